"""`proxsparse finetune MODEL`: train the kept weights of an N:M model; the mask is held.

With `torchrun` it runs on several processes: each process trains its rows of every weight on its share of the samples.
"""

import sys

from proxsparse.errors import run_command
from proxsparse.methods.finetune import FINETUNE, recorded_teacher
from proxsparse.run import job
from proxsparse.run.parse import parse_finetune


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    config = parse_finetune(sys.argv[1:] if arguments is None else arguments)
    config.teacher = config.teacher or recorded_teacher(config.model, config.distill)
    return job.run(config, FINETUNE)


if __name__ == "__main__":
    sys.exit(run_command(main))
