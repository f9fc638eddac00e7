"""`proxsparse prune --method NAME`: prune a pretrained language model by any of the methods.

--list prints the methods with their options. A run writes the pruned model as a Hugging Face checkpoint with its
tokenizer, masks.safetensors, config.yaml with every flag, and result.json. The same command line with
--resume_from_checkpoint last continues a stopped run, starts a new one, or leaves a complete one as it is.
"""

import sys

from proxsparse.errors import run_command
from proxsparse.run import job
from proxsparse.run.parse import parse_prune, tables


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--list" in arguments:
        print(tables())
        return 0
    return job.prune(parse_prune(arguments))


if __name__ == "__main__":
    sys.exit(run_command(main))
