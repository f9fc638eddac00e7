"""The machine: devices, processes, sharded parameters."""
