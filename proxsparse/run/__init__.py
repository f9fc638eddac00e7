"""One run of a command: flags, output folder, resuming, log, result and report."""
