"""Checks of the files in a model's folder before they are used: the folder may be untrusted.

Only safetensors and JSON files inside the folder are opened, never a pickle or a file elsewhere. The shape and dtype of
a tensor are checked before it is read. safetensors is imported late, so a refused file is never parsed.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError

SAFETENSORS_FLOATS = ("F64", "F32", "F16", "BF16")  # the dtypes of weights, as the files call them
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
CHAT_TEMPLATES = "additional_chat_templates/*"  # the default template is in chat_template.jinja
# Files that transformers opens by name. A link to a file elsewhere would decide which files of this machine are read.
OPENED = (
    *("*.safetensors", "*.gguf", "*.json", "*.model", "*.tiktoken", "*.jinja", "vocab.txt", "merges.txt"),
    *("additional_chat_templates", CHAT_TEMPLATES),
)
# Keys of config.json that count modules. The largest models have 130 decoder blocks, or 512 experts in a block.
# Building a model with more modules than this bound takes minutes, even on the meta device.
COUNTS = re.compile(r"(?:num|n)_(?:\w+_)?(?:layers?|experts?)|\w+_layers")
MOST_MODULES = 2048
QUANT_METHOD = "proxsparse"  # of a packed checkpoint
DEQUANTIZED = ("fp8", "mxfp4")  # quantized checkpoints that are converted to dense weights while loading
# Entry of config.json from which transformers reads the name of the weights. That of a packed checkpoint is no file, so
# transformers raises an error that contains it; `integrations.transformers_quantizer` removes it.
WEIGHTS_NAME = "transformers_weights"
PACKED = "this checkpoint is packed"  # how the entry begins in all versions
AGAIN = "download the checkpoint again"
CONVERT = "convert them with save_pretrained(folder, safe_serialization=True) in an isolated environment"
# proxsparse is not on PyPI.
FROM_CLONE = "in a clone of the repository of proxsparse run: pip install {} --no-build-isolation"
INSTALL = f"{PACKED}: {FROM_CLONE.format('.')} (or import proxsparse first, if it is installed)"


def check_folder(folder: Path) -> None:
    """Raises InputError if files of the folder name code, pickles or files elsewhere. Nothing is loaded."""
    has_weights = any((folder / name).is_file() for name in (ONE_FILE, INDEX))
    if not has_weights and list(folder.glob("*.bin")):
        pickled = "contains pickled .bin weights, which can run code when loaded"
        raise InputError(f"model {str(folder)!r}: {pickled}; {CONVERT}")
    for path in sorted(path for pattern in OPENED for path in folder.glob(pattern)):
        if not is_inside(path, folder):
            remedy = "if you trust it, replace the link with the file"
            raise InputError(f"{path}: is a link to a file outside its folder; {remedy}")
    if (folder / "adapter_config.json").exists():
        remedy = "merge it into its base model (peft: merge_and_unload) and save the result"
        raise InputError(f"model {str(folder)!r}: contains an adapter (adapter_config.json); {remedy}")
    if has_weights:
        weight_files(folder)
    for name in ("generation", "tokenizer", "processor", "preprocessor", "video_preprocessor"):
        if (path := folder / f"{name}_config.json").is_file():
            read_object(path)
    check_config(folder / "config.json")


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, with links resolved, is in the folder or in the blobs of the surrounding Hugging Face cache."""
    real, folder = path.resolve(), folder.resolve()
    snapshots = [parent for parent in folder.parents if parent.name == "snapshots"]  # a data set may have subfolders
    blobs = [(parent.parent / "blobs").resolve() for parent in snapshots]
    return real.is_relative_to(folder) or real.parent in blobs


DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def check_config(path: Path) -> None:
    """Raises InputError for a config.json with names of other files, code or unknown dtypes, or too many modules."""
    config = read_object(path)
    check_counts(config, str(path))
    refuse_quantized(config, str(path))
    for key, value in entries_of(config):
        if key == WEIGHTS_NAME and not str(value).startswith(PACKED):
            raise InputError(f"{path}: {key} is {value!r:.60}; remove it and rename the weights to {ONE_FILE}")
        if key.endswith("_implementation") and "/" in str(value):
            raise InputError(f"{path}: {key} {value!r:.60} is code on the Hub, which is never run; remove the key")
    configs = [value for key, value in entries_of(config) if key.endswith("_config") and isinstance(value, dict)]
    for key, value in (entry for entries in (config, *configs) for entry in entries.items()):
        if key in ("dtype", "torch_dtype") and isinstance(value, str) and value not in DTYPES:
            remedy = "give that of the weights, such as bfloat16, or remove the key"
            raise InputError(f"{path}: {key} {value!r:.60} is not a dtype of torch; {remedy}")


def check_counts(config: dict, name: str) -> None:
    """Raises InputError, with the name of the file, for a config that asks for more than `MOST_MODULES` modules."""
    for key, value in entries_of(config):
        if COUNTS.fullmatch(key) and isinstance(value, int) and value > MOST_MODULES:
            raise InputError(f"{name}: {key} is {value!r:.20}, but must be at most {MOST_MODULES}; {AGAIN}")


def refuse_quantized(config: dict, name: str) -> None:
    """Raises InputError, with the name of the file or model, for quantized weights that are not dequantized."""
    for key, value in entries_of(config):
        if key in ("quantization_config", "compression_config") and value:
            method = value.get("quant_method") if isinstance(value, dict) else value
            if method not in (QUANT_METHOD, *DEQUANTIZED):
                raise InputError(f"{name}: not dense: quant_method {method!s:.60}; give the unquantised checkpoint")


def entries_of(config: dict) -> Iterator[tuple[str, object]]:
    """All entries of a JSON object and of the objects in it, keys as text (a loaded config may have integers)."""
    left = [config]  # without recursion: the file may be nested deeply
    while left:
        for key, value in left.pop().items():
            if isinstance(value, dict):
                left.append(value)
            yield str(key), value


def read_object(path: Path) -> dict:
    """The JSON object in a file. Raises InputError, with the path, for anything else."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: malformed ({error}); {AGAIN}") from error
    if not isinstance(entries, dict):
        raise InputError(f"{path}: malformed (not a JSON object); {AGAIN}")
    return entries


def weight_files(folder: Path) -> list[Path]:
    """The safetensors file of a checkpoint or, as in transformers only without it, the shards that its index names.

    Raises InputError for a file that is missing or not a safetensors file of this folder, and for a malformed index.
    """
    names, index = [ONE_FILE], folder / INDEX
    if not (folder / ONE_FILE).is_file() and index.is_file():
        entries = read_object(index)
        for key in ("weight_map", "metadata"):
            if not isinstance(entries.get(key), dict):
                remedy = f'add "{key}": {{}} to it' if key == "metadata" else AGAIN
                raise InputError(f"{index}: malformed (no {key}); {remedy}")
        weight_map = entries["weight_map"]
        if not weight_map:
            raise InputError(f"{index}: contains no tensors; {AGAIN}")
        for name in weight_map.values():
            if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]{1,200}\.safetensors", name):
                where = "a shard must be a .safetensors file in the same folder"
                raise InputError(f"{index}: names {name!r:.60}, but {where}; {AGAIN}")
        names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).is_file():
            remedy = f"give the folder of a complete safetensors checkpoint; if its weights are pickled, {CONVERT}"
            raise InputError(f"{str(folder)!r}: {name} is missing; {remedy}")
    return [folder / name for name in names]


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about a tensor before the tensor is read."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes. Names of dtypes contain the number of bits (BF16, U8, F8_E4M3), except BOOL."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * int(bits[0] if bits else 8) // 8


def open_file(file: Path):
    """The open safetensors file, a context manager. Raises ValueError for a damaged file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged or truncated ({error}); download the file again") from error


def headers(files: Iterable[Path]) -> dict[str, Header]:
    """Tensor name -> header, without reading a tensor. Raises ValueError for damaged or empty files."""
    found: dict[str, Header] = {}
    for path in files:
        with open_file(path) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (a file is not a dict)
            found |= {name: Header(path, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    if not found:
        raise ValueError(f"{' '.join(map(str, files))}: contains no tensors; {AGAIN}")
    return found


def read_tensor(headers: dict[str, Header], name: str) -> Tensor:
    """Reads one tensor, not to be changed: later reads share its memory. Raises ValueError for a damaged file."""
    stat = (file := headers[name].file).stat()
    return open_once(file, stat.st_ino, stat.st_size, stat.st_mtime_ns).get_tensor(name)


@functools.lru_cache(maxsize=2)
def open_once(file: Path, *_identity: int):
    """Opens a file, or returns it if it is open: opening it for each tensor takes a time quadratic in their number."""
    return open_file(file)


def add_tensors(folder: Path, extra: dict[str, Header]) -> None:
    """Adds tensors of other files to a saved checkpoint, in one shard for each of these files; writes a new index."""
    from safetensors.torch import save_file

    old, sources = weight_files(folder), sorted({header.file for header in extra.values()})
    paths = [folder / name for name in shard_names(len(old) + len(sources))]
    for before, path in zip(old, paths, strict=False):
        before.rename(path)
    for source, path in zip(sources, paths[len(old) :], strict=True):
        names = [name for name, header in extra.items() if header.file == source]
        save_file({name: read_tensor(extra, name) for name in names}, path, {"format": "pt"})
    written = headers(paths)
    size = sum(header.size for header in written.values())
    write_index(folder, {name: header.file.name for name, header in written.items()}, size)


def shard_names(count: int) -> list[str]:
    """The names of the weight files of a checkpoint of several files."""
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """Writes which file has which tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_weights(headers: dict[str, Header], model: nn.Module) -> None:
    """Raises InputError, before memory is allocated, unless the files can contain the weights of the model.

    `model` is that of their config.json, on the meta device. Only the number of weights is compared, because
    transformers renames and merges tensors while it loads them, and reports missing ones by name: up to half here.
    """
    needed = sum(parameter.numel() for parameter in model.parameters())
    held = sum(math.prod(header.shape) for header in headers.values())
    if needed > 2 * held:
        raise InputError(f"config.json: {needed:.4g} weights are needed, but the files contain {held:.4g}; {AGAIN}")
