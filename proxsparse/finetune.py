"""`proxsparse finetune MODEL`: train the kept weights of an N:M model; the mask is held.

With `torchrun` it runs on several processes: each process trains its rows of every weight on its share of the samples.
"""

import sys
from pathlib import Path

from proxsparse.errors import InputError, run_command
from proxsparse.io.mask_files import recorded_masks
from proxsparse.models.loading import locate
from proxsparse.run import job
from proxsparse.run.config import FinetuneConfig
from proxsparse.run.parse import parse_finetune


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    config = parse_finetune(sys.argv[1:] if arguments is None else arguments)
    complete_(config)
    return job.finetune(config)


def complete_(config: FinetuneConfig) -> None:
    """Sets the --pattern and the --teacher that are not given to those that the model's masks.safetensors records.

    Without distillation there is no teacher.

    Raises:
        InputError: there is no such model; the pattern given is another one; no teacher is recorded.
    """
    locate(config.model)
    patterns, base = recorded_masks(config.model)
    names = {str(pattern) for pattern in patterns.values()}
    recorded = names.pop() if len(names) == 1 else None
    if recorded and config.pattern not in (None, recorded):
        raise InputError(f"--pattern {config.pattern}: the masks of {config.model} are {recorded}; leave --pattern out")
    config.pattern = config.pattern or recorded or "2:4"
    config.teacher = (config.teacher or base.get("base_model")) if config.distill else None
    if config.distill and not config.teacher and not Path(config.model).exists():
        raise InputError(
            f"MODEL {config.model}: no such folder; check the path (for a model of the Hub, also give its dense model "
            "with --teacher)"
        )
    if config.distill and not config.teacher:
        raise InputError(
            f"--teacher is missing: {config.model} has no masks.safetensors that names the dense model; give the dense "
            "model, or train without a teacher: --distill 0"
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
