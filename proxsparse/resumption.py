"""Going on with a run that was stopped: is it complete, has it the same flags, the same model and samples?"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse.config import LAST, NOT_SETTINGS
from proxsparse.errors import InputError

SAMPLED = 64  # weights of a parameter that tell a changed model: reading all would take as long as loading it
AGAIN = "give the same, or start anew: leave out --resume_from_checkpoint and add --overwrite_output_dir"
# Beside flags that do not change the masks: where they are computed, and what is measured of them afterwards.
MAY_DIFFER = (*NOT_SETTINGS, "device", "eval_data", "eval_seq_len", "eval_max_windows")


def is_complete(run_dir: Path) -> bool:
    """Whether the run there has left its result, which it writes last."""
    return result_of(run_dir).get("status") == "complete"


def result_of(run_dir: Path) -> dict:
    """What result.json holds; {} if it is not there, or is none."""
    try:
        result = json.loads((run_dir / "result.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def check_same_flags(run_dir: Path, before: dict, now: dict, may_differ: Iterable[str] = MAY_DIFFER) -> None:
    """Raises InputError, naming them, if flags that change the masks had other values in the run there."""
    names = [name for name in now if name not in may_differ and before.get(name) != now[name]]
    if names:
        different = ", ".join(f"--{name} {before.get(name)} (now {now[name]})" for name in names)
        raise InputError(f"--resume_from_checkpoint: the run in {str(run_dir)!r} has {different}; {AGAIN}")


def digest_of(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> str:
    """Tells another model or other samples behind the same names: sha256 of some weights of all, and of the tokens."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + bytes_of(parameter.detach().flatten()[:SAMPLED]))
    for batch in batches:
        digest.update(bytes_of(batch["input_ids"]) + bytes_of(batch["attention_mask"]))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    """The numbers of a tensor as they lie in memory, in any dtype."""
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


@contextmanager
def saying_what_is_kept(run_dir: Path, kept: Callable[[Path], str]) -> Iterator[None]:
    """Whatever ends the run early, but flags that cannot work, says what `kept(run_dir)` names and how to go on."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        with suppress(OSError):  # the disk itself may be gone
            what = kept(run_dir) if run_dir.is_dir() else f"{run_dir} cannot be reached"
            flags = f"--output_dir {run_dir} --resume_from_checkpoint {LAST}"
            error.add_note(f"{what}; to go on: the same command with {flags}")
        raise
