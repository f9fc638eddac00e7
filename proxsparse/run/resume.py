"""Resuming a stopped run: whether it has the same flags, the same model and the same samples."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.run.config import LAST, NOT_SETTINGS

SAMPLED = 64  # weights of a parameter that tell a changed model: reading all would take as long as loading it
AGAIN = "give the same, or start anew: leave out --resume_from_checkpoint and add --overwrite_output_dir"
# Beside flags that do not change the masks: where they are computed, and what is measured of them afterwards.
MAY_DIFFER = (*NOT_SETTINGS, "device", "eval_data", "eval_seq_len", "eval_max_windows")


def check_same_flags(run_dir: Path, before: dict, now: dict) -> None:
    """Raises InputError, naming them, if flags that change the masks had other values in the run there."""
    names = [name for name in now if before.get(name) != now[name]]
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
def saying_what_is_kept(final: Path, kept: Callable[[], str]) -> Iterator[None]:
    """Adds to any error but an InputError what `kept()` names, if anything, and how to resume."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        with suppress(OSError):  # the disk itself may be gone
            what = kept() if final.is_dir() else f"{final} cannot be reached"
            if what:
                flags = f"--output_dir {final} --resume_from_checkpoint {LAST}"
                error.add_note(f"{what}; to go on: the same command with {flags}")
        raise
