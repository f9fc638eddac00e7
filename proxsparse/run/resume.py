"""Resuming a stopped run: finds its progress and checks that flags, model and samples are the same.

proxsparse resumes from a checkpoint, see `training.checkpoint`. Layer-by-layer methods resume after the finished
decoder blocks, see `methods.finished_blocks`; finished_blocks/start.json identifies the run.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxsparse._version import __version__
from proxsparse.errors import InputError, describe_error, different_flags, is_full_disk
from proxsparse.evaluation.perplexity import Perplexity
from proxsparse.io.atomic import write_file
from proxsparse.io.output_folder import FINISHED_BLOCKS, OutputFolder, checkpoints
from proxsparse.methods import Method
from proxsparse.methods.finished_blocks import FORMAT
from proxsparse.methods.store import Store
from proxsparse.patterns import NMPattern
from proxsparse.run.config import LAST, NOT_REPEATED, RunConfig
from proxsparse.runtime.distributed import world_size
from proxsparse.training import checkpoint

SAMPLED = 64  # weights of each parameter in the digest of a model; reading all takes as long as loading
AGAIN = "give the same, or start again with --overwrite_output_dir instead of --resume_from_checkpoint"
# Flags that do not change the masks.
NOT_SETTINGS = (*NOT_REPEATED, "recipe", "report_to", "save_steps", "save_total_limit", "pretrained_weights")
# Flags that may differ when a run is resumed; 4 processes without accumulation equal 1 process with 4 passes.
FREE = (*NOT_SETTINGS, "device", "gradient_accumulation_steps", "gradient_checkpointing", "shard_within_node")
# If there is no checkpoint, or it is complete.
MAY_DIFFER = (*FREE, "eval_data", "eval_seq_len", "eval_max_windows", "eval_bos")


def identity_of(config: RunConfig, digest: str, eval_digest: str) -> dict:
    """The entries of a checkpoint that identify its run, as JSON."""
    return {
        "version": __version__,
        "settings": settings_of(config),
        "batches_a_step": batches_a_step(config),
        "digest": digest,
        "eval_digest": eval_digest,
    }


def settings_of(config: RunConfig) -> dict:
    """The flags that must be the same when the run is resumed."""
    return {name: value for name, value in vars(config).items() if name not in FREE}


def batches_a_step(config: RunConfig) -> int:
    """Batches per step in all processes together; 0: the method has no steps."""
    return vars(config).get("gradient_accumulation_steps", 0) * world_size()


def find_checkpoint(folder: OutputFolder, config: RunConfig, method: Method) -> tuple[Path | None, dict]:
    """The checkpoint of --resume_from_checkpoint and its state.json; (None, {}) if there is none.

    Raises:
        InputError: no such checkpoint; it is damaged, or belongs to a run with other flags.
    """
    named = config.resume_from_checkpoint
    if method.keeps != "checkpoints":
        path = None
    elif named == LAST:
        path = checkpoints(folder.path)[-1] if folder.begun and checkpoints(folder.path) else None
    else:
        path = Path(named) if named else None
    if folder.begun:
        progress = path.name if path else progress_in(folder.path)
        print(f"resuming in {folder.path}: {progress or 'nothing finished yet'}", file=sys.stderr)
    return (path, read_state(path, config)) if path else (None, {})


def check_named(config: RunConfig, method: Method) -> None:
    """Raises InputError unless --resume_from_checkpoint is `last` or the finished blocks in the output directory.

    Only for methods without checkpoints.
    """
    named, output_dir = config.resume_from_checkpoint, config.output_dir
    if method.keeps == "checkpoints" or named in (None, LAST):
        return
    folder = Path(named)
    if folder.name != FINISHED_BLOCKS or not folder.is_dir():
        raise InputError(
            f"--resume_from_checkpoint {folder}: no such directory; give OUTPUT_DIR/{FINISHED_BLOCKS}, or last"
        )
    if output_dir is not None and folder.parent.resolve() != Path(output_dir).resolve():
        raise InputError(f"--resume_from_checkpoint {folder}: not in --output_dir {output_dir}; omit --output_dir")


def read_state(path: Path, config: RunConfig) -> dict:
    """The content of a checkpoint's state.json. Raises InputError if it is damaged or the flags differ."""
    state, flag = checkpoint.read_facts(path), f"--resume_from_checkpoint {path}"
    try:
        state["scores"] = {name: score and Perplexity(**score) for name, score in state["scores"].items()}
        before, batches, _ = state["settings"], state["batches_a_step"], state["digest"]
        different = different_flags(before, settings_of(config))
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{flag}: damaged ({describe_error(error)}); give another checkpoint") from error
    if different:
        raise InputError(f"--resume_from_checkpoint: the run in {str(path)!r} has {different}; {AGAIN}")
    if batches != batches_a_step(config):
        raise InputError(
            f"{flag}: made with {batches} batches per step, but this run has {batches_a_step(config)} on "
            f"{world_size()} processes; "
            "change --gradient_accumulation_steps"
        )
    return state


def check_digest(where: Path, before: str, now: str) -> None:
    """Raises InputError if the model or the samples differ from those of the stopped run."""
    if before != now:
        raise InputError(f"{where}: the files of --model or --data have changed since the run was stopped; {AGAIN}")


def digest_of(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> str:
    """sha256 of some weights of every parameter and of all tokens, to detect changed files."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + bytes_of(parameter.detach().flatten()[:SAMPLED]))
    for batch in batches:
        digest.update(bytes_of(batch["input_ids"]) + bytes_of(batch["attention_mask"]))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor of any dtype."""
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def save_start(store: Store, patterns: dict[str, NMPattern], digest: str) -> None:
    """Creates the folder of finished blocks with start.json: patterns and digest."""
    folder = store.directory / FINISHED_BLOCKS
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    start = {"format": FORMAT, "digest": digest, "patterns": {name: str(pattern) for name, pattern in patterns.items()}}
    write_file(folder / "start.json", json.dumps(start).encode())


def load_start(store: Store, layers: Iterable[str], digest: str) -> dict[str, NMPattern] | None:
    """Layer name -> pattern, from start.json; None if the file is absent or, with a warning, damaged.

    Raises:
        InputError: the model or the samples differ from those of the finished blocks.
    """
    path = store.directory / FINISHED_BLOCKS / "start.json"
    try:
        start = json.loads(path.read_bytes())
        patterns = {name: NMPattern.parse(start["patterns"][name]) for name in layers}
        before = start["digest"]
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        print(f"{path} is damaged ({error!r}): all decoder blocks are pruned again", file=sys.stderr)
        return None
    check_digest(path, before, digest)
    return patterns


def progress_in(run_dir: Path) -> str:
    """What a run continues after: its last checkpoint, else its finished blocks; or ""."""
    if found := checkpoints(run_dir):
        return found[-1].name
    if blocks := len(list((run_dir / FINISHED_BLOCKS).glob("*.safetensors"))):
        return f"{blocks} finished decoder block{'s' * (blocks > 1)} in {FINISHED_BLOCKS}/"
    return ""


def how_to_resume(final: Path) -> str:
    """The end of a message about a stopped run that writes to `final`."""
    return f"to resume, run the same command with --output_dir {final} --resume_from_checkpoint {LAST}"


def may_pass(error: BaseException) -> bool:
    """Whether the same command may succeed later: after a signal or an error of disk, network, GPU or a process."""
    external = (KeyboardInterrupt, OSError, dist.DistError, torch.AcceleratorError)
    return isinstance(error, external) or (isinstance(error, Exception) and is_full_disk(error))


@contextmanager
def naming_progress(final: Path, progress: Callable[[], str]) -> Iterator[None]:
    """Adds the saved progress and how to resume to an error after which the same command may succeed."""
    try:
        yield
    except BaseException as error:
        if not may_pass(error):
            raise
        with suppress(OSError):  # the disk may be unreachable
            found = progress() if final.is_dir() else ""
            state = f"{found} saved" if found else f"{final} cannot be reached"
            if found or not final.is_dir():
                error.add_note(f"{state}; {how_to_resume(final)}")
            elif isinstance(error, KeyboardInterrupt):
                error.add_note("there is nothing to resume yet; to start again, run the same command")
        raise
