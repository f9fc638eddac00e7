"""`proxsparse train`: learn the N:M mask of a pretrained language model (Algorithm 1 of the paper).

With `torchrun` it runs on several processes: each process learns its rows of every weight on its share of the samples.
"""

import sys

from proxsparse.errors import run_command
from proxsparse.run import job
from proxsparse.run.parse import parse_train


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    return job.prune(parse_train(arguments))


if __name__ == "__main__":
    sys.exit(run_command(main))
