"""The output directory of a run: opening, saving the model, finishing."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from proxsparse.errors import InputError, is_full_disk
from proxsparse.io import output_folder
from proxsparse.io.atomic import atomic_directory, require_space, sync, write_file
from proxsparse.io.checkpoints import CHECKPOINTS, STEP, Checkpoints, saved_names, step_of
from proxsparse.io.mask_files import save_masks
from proxsparse.io.output_folder import CONFIG, METRICS, RESULT, OutputFolder
from proxsparse.models.loading import load_model
from proxsparse.models.saving import save_model
from proxsparse.models.snap import snap_
from proxsparse.patterns import NMPattern
from proxsparse.run.config import LAST, NOT_REPEATED, RunConfig
from proxsparse.run.model_card import write_card
from proxsparse.run.report import write_report
from proxsparse.run.result import finite
from proxsparse.runtime.distributed import on_rank_zero, world_size

# Flags that a resumed run may change, because they change neither the masks nor the weights. 4 processes without
# accumulation equal 1 process with 4 passes; a checkpoint records their product.
MAY_DIFFER = (
    *NOT_REPEATED,
    *("recipe", "report_to", "save_steps", "save_total_limit", "pretrained_weights", "device"),
    *("gradient_accumulation_steps", "gradient_checkpointing", "shard_within_node"),
    *("eval_data", "eval_seq_len", "eval_max_windows", "eval_bos"),
)


@contextmanager
def opened(config: RunConfig, command: str) -> Iterator[OutputFolder]:
    """The output directory of a run, locked for this run within the block, see `output_folder.opened`.

    Rank 0 opens it for all processes. If the block fails with an error after which the same command may succeed, the
    error names what is saved and how to resume.

    Raises:
        InputError: as `output_folder.opened`; the checkpoint to resume from does not exist.
    """
    with ExitStack() as stack:

        def enter() -> OutputFolder:
            path, resume = output_dir_of(config), config.resume_from_checkpoint is not None
            folder = stack.enter_context(
                output_folder.opened(path, command, vars(config), resume=resume, may_differ=MAY_DIFFER)
            )
            stack.enter_context(progress_in_errors(path))
            if not resume:
                return folder
            choose_checkpoint(path, config.resume_from_checkpoint)
            saved = saved_names(path)
            what = f"resuming in {path}: {progress_text(saved) or 'nothing saved yet'}"
            print(what if folder.resumed else f"no run to resume in {str(path)!r}: starting it", file=sys.stderr)
            return folder

        yield on_rank_zero(enter)


def output_dir_of(config: RunConfig) -> Path:
    """--output_dir, else that of the checkpoint to resume from, else a new one. Raises InputError for `last`."""
    named = config.resume_from_checkpoint
    if config.output_dir is not None:
        return Path(config.output_dir)
    if named == LAST:
        raise InputError("--resume_from_checkpoint last requires --output_dir")
    if named is not None:
        return Path(named).parent.parent
    return Path(f"runs/{Path(config.model).name or 'model'}-{datetime.now():%Y%m%d-%H%M%S}")


def choose_checkpoint(path: Path, named: str) -> None:
    """Removes the checkpoints of the training steps after the one that is named, unless it is `last`.

    Raises:
        InputError: the run in `path` has no such checkpoint.
    """
    if named == LAST:
        return
    checkpoints, chosen = Checkpoints(path, {}), Path(named)
    is_own = chosen.is_dir() and chosen.parent.resolve() == checkpoints.folder.resolve()
    if not is_own or not STEP.fullmatch(chosen.name):
        raise InputError(
            f"--resume_from_checkpoint {named}: not a checkpoint step-N in {str(checkpoints.folder)!r}; give one of "
            f"{', '.join(checkpoints.steps()) or 'them'}, or last"
        )
    checkpoints.remove([name for name in checkpoints.steps() if step_of(name) > step_of(chosen.name)])


def progress_text(saved: list[str]) -> str:
    """What a run resumes from: its last training step, or the number of its decoder blocks; or ""."""
    if steps := sorted(filter(STEP.fullmatch, saved), key=step_of):
        return f"{CHECKPOINTS}/{steps[-1]}"
    return f"{len(saved)} decoder block{'s' * (len(saved) > 1)} in {CHECKPOINTS}/" if saved else ""


def how_to_resume(path: Path) -> str:
    """The end of a message about a stopped run that writes to `path`."""
    return f"to resume, run the same command with --output_dir {path} --resume_from_checkpoint {LAST}"


@contextmanager
def progress_in_errors(path: Path) -> Iterator[None]:
    """Adds what is saved, and how to resume, to an error of a signal, disk, network, GPU or other process."""
    try:
        yield
    except BaseException as error:
        external = (KeyboardInterrupt, OSError, dist.DistError, torch.AcceleratorError)
        if isinstance(error, external) or (isinstance(error, Exception) and is_full_disk(error)):
            with suppress(OSError):  # the disk may be unavailable
                reached = path.is_dir()
                saved = progress_text(saved_names(path)) if reached else ""
                if saved or not reached:
                    state = f"{saved} saved" if saved else f"{path} cannot be reached"
                    error.add_note(f"{state}; {how_to_resume(path)}")
                elif isinstance(error, KeyboardInterrupt):
                    error.add_note("nothing has been saved; to start again, run the same command")
        raise


def start(folder: OutputFolder, config: RunConfig) -> None:
    """Writes config.yaml, and removes the result of the part of the run before it was interrupted."""
    (folder.path / RESULT).unlink(missing_ok=True)
    settings = {name: value for name, value in vars(config).items() if value is not None and name not in NOT_REPEATED}
    write_file(folder.path / CONFIG, yaml.safe_dump(settings, sort_keys=False).encode())


def require_space_for(
    model: nn.Module, path: Path, updated: dict[str, nn.Linear] | None = None, weight_dtype: torch.dtype | None = None
) -> None:
    """Raises InputError if the disk cannot hold the pruned model, its masks and small files.

    Args:
        updated: layers whose new weights are saved in checkpoints during the run, in `weight_dtype`.
    """
    weights = sum(p.numel() * p.element_size() + p.numel() // 8 for p in model.parameters())
    blocks = sum(layer.weight.numel() * weight_dtype.itemsize for layer in (updated or {}).values())
    require_space(path, weights + blocks + 2**24)


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


def save_pruned(
    path: Path,
    model: nn.Module,
    tokenizer,
    masks: dict[str, Tensor],
    patterns: dict[str, NMPattern],
    base: dict[str, str],
) -> None:
    """Writes the pruned model (dense, zeros +0.0), its tokenizer and its masks, atomically.

    Args:
        patterns: layer name -> pattern.
        base: the pretrained model, see `models.loading.base_identity`.
    """
    with atomic_directory(path) as scratch:
        save_masks(scratch / output_folder.MASKS, masks, patterns, **base)
        save_model(scratch, model, tokenizer)


def finish(folder: OutputFolder, result: dict) -> None:
    """Writes result.json, which marks the end of the run, and the report (with metrics.jsonl) or the model card.

    A complete run removes its checkpoints.
    """
    path = folder.path
    if (path / METRICS).exists():
        sync(path / METRICS)
    else:
        write_card(path, result)
    write_file(path / RESULT, (json.dumps(finite(result), indent=2) + "\n").encode())
    if (path / METRICS).exists():
        write_report(path)
    if result["status"] == "complete":
        output_folder.remove_checkpoints(path)


def nothing_left(folder: OutputFolder) -> bool:
    """Whether the resumed run is complete. If so, repeats the last actions, which a kill may have prevented."""
    if not folder.complete:
        return False
    if (folder.path / METRICS).exists():
        write_report(folder.path)
    output_folder.remove_checkpoints(folder.path)
    print(f"{folder.path}: this run is complete; nothing to do")
    return True
