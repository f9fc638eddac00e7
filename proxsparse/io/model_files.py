"""The files of a model's folder, judged before they are used: the folder may be a stranger's.

Opened are safetensors and settings inside the folder; never a pickle, never a file that one of them names elsewhere,
and a tensor only after its shape and dtype. No package but safetensors, and that late: what is refused is never parsed.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from proxsparse.errors import InputError

SAFETENSORS_FLOATS = ("F64", "F32", "F16", "BF16")  # the dtypes of weights, as the files call them
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What transformers opens in a folder by these names. A link out of it would choose what of this machine is read.
OPENED = (
    *("*.safetensors", "*.gguf", "*.json", "*.model", "*.tiktoken", "*.jinja", "vocab.txt", "merges.txt"),
    *("additional_chat_templates", "additional_chat_templates/*"),
)
# Keys that count modules which a model is built of. The largest models have 130 decoder blocks, or 512 experts in one;
# beyond this bound building it, even without memory for the weights, would take minutes.
COUNTS = re.compile(r"(?:num|n)_(?:\w+_)?(?:layers?|experts?)|\w+_layers")
MOST_MODULES = 2048


def check_folder(folder: Path) -> None:
    """Raises InputError for a folder whose files name code, pickles or files elsewhere; nothing in it is loaded."""
    refuse_pickles(folder)
    refuse_links(folder)
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"model {str(folder)!r} holds an adapter (adapter_config.json names another model); merge it into its base "
            "model (peft: merge_and_unload) and save that"
        )
    if (folder / INDEX).is_file():
        shards(folder / INDEX)
    check_config(folder / "config.json")


def refuse_pickles(folder: Path) -> None:
    """Raises InputError for a checkpoint that has pickled weights only."""
    if not any((folder / name).is_file() for name in (ONE_FILE, INDEX)) and list(folder.glob("*.bin")):
        raise InputError(
            f"model {str(folder)!r} holds pickled .bin weights, which can run code when loaded; convert it once with "
            "save_pretrained(folder, safe_serialization=True) in an environment you trust"
        )


def refuse_links(folder: Path) -> None:
    """Raises InputError for a link out of the folder in the place of a file that loading it would open."""
    for pattern in OPENED:
        for path in sorted(folder.glob(pattern)):
            if path.is_symlink() and not is_inside(path, folder):
                raise InputError(
                    f"{path} is a link out of its folder; if you trust the folder, put the file itself in its place"
                )


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, its links followed, is in the folder or among the blobs of the Hugging Face cache around it."""
    real, folder = path.resolve(), folder.resolve()
    return real.is_relative_to(folder) or real.parent == (folder.parent.parent / "blobs").resolve()


def check_config(path: Path) -> None:
    """Raises InputError for a config.json that names other files or code, or more modules than any model has."""
    entries = [read_object(path)]
    while entries:
        for key, value in entries.pop().items():
            if isinstance(value, dict):
                entries.append(value)
            if key == "transformers_weights":
                raise InputError(
                    f"{path}: transformers_weights names {value!r:.60}; name the weights {ONE_FILE} instead"
                )
            if key.endswith("_implementation") and "/" in str(value):
                raise InputError(f"{path}: {key} {value!r:.60} is code on the Hub, which is never run here; remove it")
            if COUNTS.fullmatch(key) and isinstance(value, int) and value > MOST_MODULES:
                raise InputError(f"{path}: {key} of {value:.4g}: no model has more than {MOST_MODULES}; get it again")


def read_object(path: Path) -> dict:
    """The JSON object in a file. Raises InputError, with the path, for anything else."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is malformed: {error}; get the checkpoint again") from error
    if not isinstance(entries, dict):
        raise InputError(f"{path} is malformed: it holds no JSON object; get the checkpoint again")
    return entries


def is_shard_name(name: object) -> bool:
    """Whether it is the plain name of a safetensors file: no folders in it, no other format."""
    return isinstance(name, str) and re.fullmatch(r"[^/\\\0]{1,200}\.safetensors", name) is not None


def shards(index: Path) -> list[Path]:
    """The files that an index names, in the order of their names.

    Raises:
        InputError: one is not a safetensors file of this folder, or absent; or the index is malformed or empty.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index} is malformed: it has no weight_map; get the checkpoint again")
    for name in weight_map.values():
        if not is_shard_name(name):
            raise InputError(
                f"{index} names {name!r:.60}: a shard must be a .safetensors file in the same folder; get the "
                "checkpoint again, or convert it in an environment you trust"
            )
    if not weight_map:
        raise InputError(f"{index} holds no tensors; get the checkpoint again")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    require_files(files)
    return files


def require_files(files: Iterable[Path]) -> None:
    """Raises InputError for a file that is absent, no plain file, or a link out of its folder."""
    for file in files:
        folder = file.parent
        if not file.is_file():
            raise InputError(
                f"{str(folder)!r} has no {file.name}: give the folder of a whole safetensors checkpoint (pickled "
                "weights are not read; convert them once with save_pretrained in an environment you trust)"
            )
        if not is_inside(file, folder):
            raise InputError(f"{file} is a link out of its folder; put the file itself there")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or the shards that its index names. Raises as `shards` does."""
    if (folder / INDEX).is_file():
        return shards(folder / INDEX)
    require_files([folder / ONE_FILE])
    return [folder / ONE_FILE]


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of one tensor before it is read."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes; the dtypes have their bits in their names, BF16, U8, F8_E4M3, but for BOOL."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * int(bits[0] if bits else 8) // 8


def open_file(file: Path):
    """The open safetensors file, a context manager. Raises ValueError for a damaged one."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut off ({error}); get the file again") from error


def headers(files: Iterable[Path]) -> dict[str, Header]:
    """Tensor name -> header, without reading a tensor. Raises ValueError for a damaged file, or without any tensor."""
    found: dict[str, Header] = {}
    for path in files:
        with open_file(path) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (a file is no dict)
            found |= {name: Header(path, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    if not found:
        raise ValueError(f"{' '.join(map(str, files))} holds no tensors; get the checkpoint again")
    return found


def read_tensor(found: dict[str, Header], name: str) -> Tensor:
    """The tensor of that name, alone in memory. Raises ValueError for a damaged file."""
    with open_file(found[name].file) as file:
        return file.get_tensor(name)


def check_weights(found: dict[str, Header], model: nn.Module) -> None:
    """Raises InputError unless the files can hold the model's weights: before memory is taken for them.

    By their number, as transformers renames and joins tensors while it loads them: it names those that are absent or of
    another shape only after it has made them. Half may be absent here, so that its names reach the user.

    Args:
        found: the headers of a dense checkpoint.
        model: the model of its config.json on the meta device.
    """
    parameters = dict(model.named_parameters())
    needed = sum(parameter.numel() for parameter in parameters.values())
    held = sum(math.prod(header.shape) for header in found.values())
    if needed > 2 * held:
        raise InputError(
            f"by config.json the model has {needed:.4g} weights, its files hold {held:.4g}; get the whole checkpoint"
        )
    for name in sorted(parameters.keys() & found.keys()):
        if (header := found[name]).dtype not in SAFETENSORS_FLOATS:
            raise InputError(
                f"{header.file}: {name} is {header.dtype}, a weight must be {', '.join(SAFETENSORS_FLOATS)}; "
                "give the dense checkpoint"
            )
