"""`proxsparse finetune MODEL`: train the kept weights of an N:M model; the mask is held.

With `torchrun` it runs on several processes: each process trains its rows of every weight on its share of the samples.
"""

import sys
from pathlib import Path

from proxsparse.errors import InputError, run_command
from proxsparse.io.mask_files import recorded_masks
from proxsparse.models.loading import locate
from proxsparse.run import job
from proxsparse.run.args import RunArgs
from proxsparse.run.parse import parse_finetune


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    args = parse_finetune(arguments)
    complete_(args)
    return job.execute(args, job.finetune_model)


def complete_(args: RunArgs) -> None:
    """Sets a --pattern that is not given to the one that the model's masks.safetensors records, if it is one.

    Without recorded patterns, that of each layer is found from its zeros. Without distillation there is no teacher.
    Raises InputError if there is no such model, another pattern is given, or no teacher is given or recorded.
    """
    model = args.model
    locate(model.model)
    patterns, base = recorded_masks(model.model)
    recorded = sorted({str(pattern) for pattern in patterns.values()})
    if recorded and model.pattern and recorded != [model.pattern]:
        what = f"the masks of {model.model} are {', '.join(recorded)}"
        raise InputError(f"--pattern {model.pattern}: {what}; leave --pattern out")
    model.pattern = recorded[0] if len(recorded) == 1 else model.pattern
    if not args.options.distill:
        model.teacher = None
    elif not (model.teacher or base.get("base_model")):
        if not Path(model.model).exists():
            raise InputError(f"MODEL {model.model}: no such folder; check the path (for a Hub model, add --teacher)")
        reason = f"{model.model} has no masks.safetensors that names the dense model"
        raise InputError(f"--teacher is missing: {reason}; give it, or train without a teacher: --distill 0")


if __name__ == "__main__":
    sys.exit(run_command(main))
