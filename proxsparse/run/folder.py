"""The output folder of a run: opening, writing, finishing."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.io import output_folder
from proxsparse.io.atomic import atomic_directory, require_space, sync, write_file
from proxsparse.io.mask_files import save_masks
from proxsparse.io.output_folder import NEXT, OutputFolder
from proxsparse.models.loading import load_model
from proxsparse.models.saving import save_model
from proxsparse.models.snap import snap_
from proxsparse.patterns import NMPattern
from proxsparse.run.config import LAST, NOT_REPEATED, RunConfig
from proxsparse.run.model_card import write_card
from proxsparse.run.report import write_report
from proxsparse.run.result import finite
from proxsparse.runtime.distributed import on_rank_zero, world_size

# Flags whose value may be a file or a folder that the run reads.
INPUTS = ("model", "data", "eval_data", "config", "resume_from_checkpoint")


@contextmanager
def opened(config: RunConfig, command: str, may_differ: tuple[str, ...]) -> Iterator[OutputFolder]:
    """The output folder of a run, locked for this run within the block, see `output_folder.opened`.

    Rank 0 opens it for all processes. `may_differ`: flags that a resumed run may change.

    Raises:
        InputError: as `output_folder.opened`; the folder is that of the model; there is no run to resume.
    """
    with ExitStack() as stack:

        def enter() -> OutputFolder:
            final = output_dir_of(config)
            if final.exists() and Path(config.model).exists() and final.samefile(config.model):
                raise InputError(f"--output_dir {str(final)!r}: the folder of the model; choose another folder")
            folder = stack.enter_context(
                output_folder.opened(
                    final,
                    command,
                    vars(config),
                    overwrite=config.overwrite_output_dir,
                    resume=is_resumed_in(final, config.resume_from_checkpoint),
                    may_differ=may_differ,
                    inputs={name: value for name in INPUTS if (value := vars(config).get(name)) not in (None, LAST)},
                )
            )
            if config.resume_from_checkpoint == LAST and not folder.begun:
                print(f"no run to resume in {str(final)!r}: starting from the beginning", file=sys.stderr)
            return folder

        yield on_rank_zero(enter)


def output_dir_of(config: RunConfig) -> Path:
    """--output_dir, else the folder of the checkpoint to resume from, else a new one. Raises InputError for `last`."""
    asked = config.resume_from_checkpoint
    if config.output_dir is not None:
        return Path(config.output_dir)
    if asked == LAST:
        raise InputError("--resume_from_checkpoint last requires --output_dir")
    if asked is not None:
        around = Path(asked).resolve().parent
        return around.parent if around.name == NEXT else around
    return Path(f"runs/{Path(config.model).name or 'model'}-{datetime.now():%Y%m%d-%H%M%S}")


def is_resumed_in(final: Path, asked: str | None) -> bool:
    """Whether --resume_from_checkpoint continues in this output directory: `last`, or a folder inside of it."""
    if asked is None or asked == LAST:
        return asked == LAST
    return Path(asked).resolve().parent in (final.resolve(), (final / NEXT).resolve())


def start_run(run_dir: Path, config: RunConfig, resumed: Path | None = None) -> None:
    """Writes config.yaml, restores metrics.jsonl from the checkpoint `resumed` or removes it, removes result.json."""
    (run_dir / output_folder.RESULT).unlink(missing_ok=True)
    settings = {name: value for name, value in vars(config).items() if value is not None}
    settings = {name: value for name, value in settings.items() if name not in NOT_REPEATED}
    write_file(run_dir / "config.yaml", yaml.safe_dump(settings, sort_keys=False).encode())
    if resumed is not None:
        write_file(run_dir / output_folder.METRICS, (resumed / output_folder.METRICS).read_bytes())
    else:
        (run_dir / output_folder.METRICS).unlink(missing_ok=True)


def require_space_for(
    model: nn.Module, run_dir: Path, updated: dict[str, nn.Linear], weight_dtype: torch.dtype
) -> None:
    """Raises InputError if the disk cannot hold the pruned model, its masks and small files.

    Args:
        updated: layers whose new weights are saved in finished blocks during the run, in `weight_dtype`.
    """
    weights = sum(p.numel() * p.element_size() + p.numel() // 8 for p in model.parameters())
    blocks = sum(layer.weight.numel() for layer in updated.values()) * weight_dtype.itemsize
    require_space(run_dir, weights + blocks + 2**24)


def whole_model(model: nn.Module, name: str, masks: dict[str, Tensor], trained: dict[str, Tensor]) -> nn.Module:
    """The model; a sharded one is loaded again by its name, and gets its trained parameters and the masks.

    Args:
        trained: parameter name -> its value.
    """
    if world_size() == 1:
        return model
    model, _ = load_model(name)
    for parameter_name, value in trained.items():
        parameter = model.get_parameter(parameter_name)
        parameter.data = value.to(parameter.dtype)
    snap_(model, {name: parameter.detach() for name, parameter in model.named_parameters()}, masks)
    return model


def save_checkpoint(
    run_dir: Path,
    model: nn.Module,
    tokenizer,
    masks: dict[str, Tensor],
    patterns: dict[str, NMPattern],
    base: dict[str, str],
) -> None:
    """Writes the masks, then the pruned model (dense, zeros +0.0) and its tokenizer; both steps are atomic.

    Args:
        patterns: layer name -> pattern.
        base: the pretrained model, see `models.loading.base_identity`.
    """
    with atomic_directory(run_dir) as scratch:
        save_masks(scratch / output_folder.MASKS, masks, patterns, **base)
    with atomic_directory(run_dir) as scratch:
        save_model(scratch, model, tokenizer)
        output_folder.claim(run_dir, [entry.name for entry in scratch.iterdir()])


def save_result(run_dir: Path, result: dict) -> None:
    """Writes result.json, which marks the run as finished, and the report (with metrics.jsonl) or the model card."""
    if (run_dir / output_folder.METRICS).exists():
        sync(run_dir / output_folder.METRICS)
    else:
        write_card(run_dir, result)
    write_file(run_dir / output_folder.RESULT, (json.dumps(finite(result), indent=2) + "\n").encode())
    if (run_dir / output_folder.METRICS).exists():
        write_report(run_dir)


def nothing_left(folder: OutputFolder) -> bool:
    """Whether the resumed run is complete. If so, repeats the last actions, which a kill may have prevented."""
    if not folder.complete:
        return False
    if (folder.path / output_folder.METRICS).exists():
        write_report(folder.path)
    finish(folder)
    print(f"{folder.final}: this run is complete; nothing to do")
    return True


def finish(folder: OutputFolder) -> None:
    """Removes checkpoints and finished blocks; with --overwrite_output_dir, replaces the earlier result."""
    output_folder.remove_in_progress(folder.path)
    output_folder.publish(folder)
