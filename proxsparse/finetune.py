"""`proxsparse finetune MODEL`: train the kept weights of an N:M model; the mask is held.

With `torchrun` it runs on several processes: each process trains its rows of every weight on its share of the samples.
"""

import sys

from proxsparse.errors import run_command
from proxsparse.run import job
from proxsparse.run.parse import parse_finetune


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    return job.execute(parse_finetune(arguments), job.finetune_model)


if __name__ == "__main__":
    sys.exit(run_command(main))
