"""Damaged files, made from valid ones, each by its kind. The same random state gives the same files."""

import gzip
import json
import struct
from pathlib import Path
from random import Random

Files = dict[str, bytes]  # name in the folder -> content
INTEGERS = (0, 1, -1, 2, 3, 7, 64, 255, 4096, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**18, -(10**18))
FLOATS = (0.0, -0.0, 0.5, 1e-320, 1e30, 1e300, -1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", " ", "a", "\0", "\ud800", "\u2028", "é" * 300, "x" * 10_000, "2:4", "1:4", "9:8", "mixed", "nan", "1e999"),
    *("../../etc/passwd", "/etc/passwd", "~/.ssh/id_rsa", "a/b.safetensors", "..", ".", "pytorch_model.bin", "-", "%s"),
    *("proxsparse", "BOOL", "F32", "U8", "F8_E4M3", "C64", "\x1b[2J", "|a|b|", "```", "{0}", "$HOME", "true", "null"),
)
# Placeholder -> what `as_json` writes in its place: json.dumps cannot make these.
RAW = {
    '"@deep@"': "[" * 100_000 + "]" * 100_000,
    '"@objects@"': '{"a":' * 50_000 + "1" + "}" * 50_000,
    '"@open@"': "[" * 20_000,
    '"@digits@"': "9" * 5000,
    '"@float@"': "1" * 400 + ".5e400",
    '"@twice@"': '{"a": 1, "a": 2}',
}


def odd_value(random: Random, like: object = None) -> object:
    """A value that no loader expects; for a number or text often an odd one of the same kind, which gets furthest."""
    if isinstance(like, str | int | float) and random.random() < 0.5:
        return random.choice(TEXTS if isinstance(like, str) else (*INTEGERS, *FLOATS, "@digits@", "@float@"))
    near_the_limit = "@nested@" + str(random.randrange(850, 1000))  # Python's recursion limit is 1000
    some = [random.choice(values) for values in (INTEGERS, FLOATS, TEXTS) * 2]
    trees = (None, True, False, [], {}, [[]], [None], {"": None}, [1, "a", None], {"a": {"b": []}}, near_the_limit)
    return random.choice((*trees, *some, random.choice(list(RAW))[1:-1]))


def changed(random: Random, tree: object) -> object:
    """A copy of a JSON tree in which one to three places are replaced, removed, renamed or added to."""
    tree = json.loads(json.dumps(tree))
    for _ in range(random.randint(1, 3)):
        node, parent, key = tree, None, None
        while isinstance(node, dict | list) and node and (parent is None or random.random() < 0.8):
            parent, key = node, random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
            node = node[key]
        kind = random.random()
        if parent is None or kind > 0.97:
            return odd_value(random)
        if kind < 0.15:
            del parent[key]
        elif kind < 0.25 and isinstance(parent, dict):
            parent[random.choice(TEXTS)] = parent.pop(key)
        elif kind < 0.35:
            parent[key] = [node] * random.randint(0, 3)
        else:
            parent[key] = odd_value(random, node)
    return tree


def as_json(tree: object) -> str:
    """The tree as JSON, with the values of `RAW` and "@nested@N" written out."""
    text = json.dumps(tree)
    for placeholder, raw in RAW.items():
        text = text.replace(placeholder, raw, 2)
    while (at := text.find('"@nested@')) >= 0:
        end = text.index('"', at + 1) + 1
        depth = int(text[at + 9 : end - 1])
        text = text[:at] + "[" * depth + "]" * depth + text[end:]
    return text


def damaged(random: Random, content: bytes) -> bytes:
    """Bits flipped, a part cut off, removed, doubled or replaced."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5, 20))):
        at, size = random.randrange(len(data) + 1), random.choice((1, 2, 8, 64, 1000))
        kind = random.randrange(7)
        if kind <= 1 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + size]
        elif kind == 4:
            data[at:at] = data[at : at + size]
        elif kind == 5:
            data[at : at + size] = random.randbytes(size)
        else:
            data[at : at + 8] = struct.pack("<q", max(-(2**63), min(2**63 - 1, random.choice(INTEGERS))))
    return bytes(data)


def damage(random: Random, files: Files) -> Files:
    """Damages one or two of the files; a model may also get an index that names files elsewhere."""
    files, names = dict(files), [name for name in ("model.safetensors", "config.json") if name in files]
    if names and random.random() < 0.15:
        shards = (*TEXTS, "model.safetensors", "outside.safetensors", "pipe.safetensors")
        index = {"metadata": {}, "weight_map": {name: random.choice(shards) for name in "ab"}}
        index = changed(random, index) if random.random() < 0.5 else index
        files["model.safetensors.index.json"] = as_json(index).encode()
    else:
        names = names if names and random.random() < 0.8 else sorted(files)
        for name in random.sample(names, random.randint(1, min(2, len(names)))):
            files[name] = damaged_file(random, name, files[name])
    return files


def damaged_file(random: Random, name: str, content: bytes) -> bytes:
    kind = Path(name).suffix
    if kind == ".gz" and random.random() < 0.02:  # a bomb: 1000 to 1
        return gzip.compress(bytes(random.choice((1 << 20, 80 << 20))), 1)
    if kind == ".gz" and random.random() < 0.3:
        return gzip.compress(damaged_file(random, name.removesuffix(".gz"), gzip.decompress(content)))
    if kind == ".safetensors":
        return damaged_safetensors(random, content)
    if kind == ".yaml":
        content = damaged_yaml(random, content.decode())
    elif kind == ".json":
        tree = json.loads(content)
        if "quantization_config" in tree and random.random() < 0.6:
            tree["quantization_config"] = changed(random, tree["quantization_config"])
        else:
            tree = changed(random, tree)
        content = as_json(tree).encode()
    elif kind == ".jsonl":
        lines = content.decode().splitlines()
        lines = [as_json(changed(random, json.loads(line))) if random.random() < 0.4 else line for line in lines]
        content = "".join(line + "\n" for line in lines).encode()
    else:
        return damaged(random, content)
    return damaged(random, content) if random.random() < 0.25 else content


SIZES = dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3"), 1) | dict.fromkeys(("BF16", "F16", "I16"), 2)
SIZES |= {"F32": 4, "I32": 4, "F64": 8, "I64": 8}
EMPTY = ([0], [0, 8], [8, 0], [10**18, 0], [0, 10**18], [2**62, 2**62, 0], [0] * 70)


def split_safetensors(content: bytes) -> tuple[dict, bytes]:
    """A safetensors file -> its header, the bytes of its tensors."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_safetensors(header: object, body: bytes, length: int | None = None) -> bytes:
    """The inverse; `length` replaces the header's own."""
    text = as_json(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def damaged_safetensors(random: Random, content: bytes) -> bytes:
    """A safetensors file with another header: half of these are valid, with unexpected tensors."""
    header, body = split_safetensors(content)
    tensors, metadata = [x for name, x in header.items() if name != "__metadata__"], header.get("__metadata__")
    kind, entry = random.randrange(7), random.choice(tensors)
    start, end = entry["data_offsets"]
    if kind == 0:
        return damaged(random, content)
    if kind == 1:
        header = changed(random, header)
    elif kind == 2:  # another dtype and shape of the same bytes
        entry["dtype"] = random.choice(list(SIZES))
        count = (end - start) // SIZES[entry["dtype"]]
        last = random.choice([n for n in range(1, 65) if count % n == 0])
        shapes = ([count], [count // last, last], [1, count], [count, 1], [count // last, 1, last])
        entry["shape"] = random.choice(shapes)
    elif kind == 3:  # empty, with any shape
        body = body[:start] + body[end:]
        for other in tensors:
            if other["data_offsets"][0] >= end:
                other["data_offsets"] = [place - (end - start) for place in other["data_offsets"]]
        entry |= {"data_offsets": [start, start], "shape": random.choice(EMPTY)}
    elif kind == 4:
        entry["data_offsets"] = [random.choice(INTEGERS), random.choice(INTEGERS)]
    elif kind == 5 and metadata:  # may hold JSON within the JSON
        key = random.choice(list(metadata))
        text = metadata[key]
        metadata[key] = as_json(changed(random, json.loads(text))) if text[:1] == "{" else random.choice(TEXTS)
    else:
        body = damaged(random, body)
    length = random.choice(INTEGERS) % 2**64 if random.random() < 0.05 else None
    return join_safetensors(header, body, length)


# Tags, aliases, merges, other documents, invalid numbers and dates, flags of the command line only.
ODD_YAML = r"""
a: &a [x, x]
b: &b [*a, *a, *a]
<<: *a
? [1, 2] : 3
!!python/name:os.system x: 1
seq_len: !!python/object/apply:os.system ['true']
seq_len: !!int abc
seq_len: !!float x
seq_len: !!set {a}
seq_len: .nan
seed: !!binary x
seed: !!timestamp never
seed: 2001-99-99
seed: 1_0:2:3
packing: !!bool x
learning_rate: .inf
include: [1, [2]]
model: "\ud800"
model: "\0"
config: x.yaml
output_dir: /etc
start: /etc/passwd
precision: 1
- a
--- 1
...
%YAML 9.9
@
	"""
YAML_LINES = [
    *ODD_YAML.splitlines(),
    *("seed: 0x" + "f" * 9000, "seed: " + "9" * 9000, "learning_rate: " + "1" * 400),
    *("include: " + "[" * 600, "include: " + "{a: " * 400),
]


def damaged_yaml(random: Random, content: str) -> bytes:
    """Lines doubled, replaced, given another value, or odd ones inserted."""
    lines = content.splitlines()
    for _ in range(random.randint(1, 3)):
        at, kind = random.randrange(len(lines)), random.randrange(4)
        if kind == 0:
            lines[at:at] = random.sample(YAML_LINES, random.randint(1, 3))
        elif kind == 1:
            lines[at] = lines[at].partition(":")[0] + ": " + as_json(odd_value(random))[:600]
        elif kind == 2:
            lines.insert(at, lines[random.randrange(len(lines))])
        else:
            lines[at] = random.choice(YAML_LINES)
    return "\n".join(lines).encode("utf-8", "surrogatepass")
