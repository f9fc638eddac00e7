"""`proxsparse report RUN`: regenerates the report and the plots of a run."""

import sys
from pathlib import Path

from proxsparse.errors import InputError, run_command
from proxsparse.io.output_folder import MARKER, read_marker
from proxsparse.run.report import write_report
from proxsparse.runtime.command import Parser


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("report", description="Regenerate the report and the plots of a run, also while it is running.")
    parser.add_argument("run_dir", help="the --output_dir of `proxsparse train`")
    run_dir = Path(parser.parse_args(arguments).run_dir)
    if not run_dir.is_dir() or read_marker(run_dir) is None:  # its files are not those of a run
        reason = f"no {MARKER} in this folder, so no run wrote it" if run_dir.is_dir() else "not a folder"
        raise InputError(f"{run_dir}: {reason}; give the --output_dir of `proxsparse train`")
    names = write_report(run_dir)
    print(f"wrote {run_dir / 'report.md'}{' and plots' * (len(names) > 1)}")


if __name__ == "__main__":
    sys.exit(run_command(main))
