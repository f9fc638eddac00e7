"""Damaged files, made from valid ones. The same random state gives the same files."""

import gzip
import json
import struct
from pathlib import Path
from random import Random

import yaml

Files = dict[str, bytes]  # name in the folder -> content
NUMBERS = (0, 1, -1, 3, 7, 255, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**18, -(10**18))
NUMBERS += (-0.0, 0.5, 1e-320, 1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", " ", "a", "\0", "\ud800", "\u2028", "x" * 10_000, "2:4", "9:8", "mixed", "nan", "1e999", "-", "%s", "{0}"),
    *("../../etc/passwd", "/etc/passwd", "a/b.safetensors", "..", ".", "pytorch_model.bin", "outside.safetensors"),
    *("pipe.safetensors", "proxsparse", "BOOL", "F32", "U8", "F8_E4M3", "C64", "\x1b[2J", "|a|b|", "```", "null"),
)
# Placeholder -> what `as_json` writes in its place: json.dumps cannot make these.
RAW = {
    '"@deep@"': "[" * 100_000 + "]" * 100_000,
    '"@near the recursion limit@"': "[" * 960 + "]" * 960,
    '"@open@"': "[" * 20_000,
    '"@digits@"': "9" * 5000,
    '"@float@"': "1" * 400 + ".5e400",
    '"@twice@"': '{"a": 1, "a": 2}',
}
ODD = (
    *NUMBERS,
    *TEXTS,
    *(name[1:-1] for name in RAW),
    *(None, True, [], {}, [[]], {"": None}, [1, "a"], {"a": {"b": []}}),
)


def changed(random: Random, tree: object) -> object:
    """A copy of a JSON tree in which one to three places are replaced, removed, renamed or repeated."""
    tree = json.loads(json.dumps(tree))
    for _ in range(random.randint(1, 3)):
        node, parent, key = tree, None, None
        while isinstance(node, dict | list) and node and (parent is None or random.random() < 0.8):
            parent, key = node, random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
            node = node[key]
        kind = random.random()
        if parent is None or kind > 0.97:
            return random.choice(ODD)
        if kind < 0.15:
            del parent[key]
        elif kind < 0.25 and isinstance(parent, dict):
            parent[random.choice(TEXTS)] = parent.pop(key)
        elif kind < 0.35:
            parent[key] = [node] * random.randint(0, 3)
        else:  # half of them of the same kind, which gets furthest
            alike = TEXTS if isinstance(node, str) else NUMBERS if isinstance(node, int | float) else ODD
            parent[key] = random.choice(random.choice((alike, ODD)))
    return tree


def as_json(tree: object) -> str:
    """The tree as JSON, with the values of `RAW` written out."""
    text = json.dumps(tree)
    for placeholder, raw in RAW.items():
        text = text.replace(placeholder, raw, 2)
    return text


def damaged_bytes(random: Random, content: bytes) -> bytes:
    """A bit flipped, a part cut off, removed, repeated or replaced, once or more."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5, 20))):
        at, size = random.randrange(len(data) + 1), random.choice((1, 2, 8, 64, 1000))
        kind = random.randrange(6)
        if kind <= 1 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + size]
        elif kind == 4:
            data[at:at] = data[at : at + size]
        else:
            data[at : at + size] = random.randbytes(size)
    return bytes(data)


def damage(random: Random, files: Files) -> Files:
    """Damages one or two of the files; a model may also get an index that names files elsewhere."""
    files, names = dict(files), [name for name in ("model.safetensors", "config.json") if name in files]
    if names and random.random() < 0.15:
        index = {"metadata": {}, "weight_map": {name: random.choice(TEXTS) for name in "ab"}}
        files["model.safetensors.index.json"] = as_json(changed(random, index)).encode()
        return files
    names = names if names and random.random() < 0.8 else sorted(files)
    for name in random.sample(names, random.randint(1, min(2, len(names)))):
        files[name] = damaged_file(random, name, files[name])
    return files


def damaged_file(random: Random, name: str, content: bytes) -> bytes:
    """The file with another structure of its kind, or with other bytes."""
    kind = Path(name).suffix
    if random.random() < 0.25:
        return damaged_bytes(random, content)
    if kind == ".gz":
        return gzip.compress(damaged_file(random, name.removesuffix(".gz"), gzip.decompress(content)), 1)
    if kind == ".safetensors":
        return damaged_safetensors(random, content)
    if kind == ".yaml":  # JSON is YAML
        return as_json(changed(random, yaml.safe_load(content))).encode()
    if kind == ".json":
        tree = json.loads(content)
        if "quantization_config" in tree and random.random() < 0.6:
            return as_json(tree | {"quantization_config": changed(random, tree["quantization_config"])}).encode()
        return as_json(changed(random, tree)).encode()
    if kind == ".jsonl":
        rows = map(json.loads, content.splitlines())
        return lines_of([changed(random, row) if random.random() < 0.4 else row for row in rows])
    return damaged_bytes(random, content)


def lines_of(rows: list) -> bytes:
    """Each row as a line of JSON."""
    return "".join(as_json(row) + "\n" for row in rows).encode()


def split_safetensors(content: bytes) -> tuple[dict, bytes]:
    """A safetensors file -> its header, the bytes of its tensors."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_safetensors(header: object, body: bytes) -> bytes:
    """The inverse."""
    text = as_json(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def damaged_safetensors(random: Random, content: bytes) -> bytes:
    """Another header: any change of its tree, of JSON within its metadata, or a valid one for the same bytes."""
    header, body = split_safetensors(content)
    metadata = header.get("__metadata__")
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    kind, entry = random.randrange(5), random.choice(entries)
    if kind == 0:
        header = changed(random, header)
    elif kind == 1 and metadata:
        key = random.choice(list(metadata))
        text = metadata[key]
        metadata[key] = as_json(changed(random, json.loads(text))) if text[:1] == "{" else random.choice(TEXTS)
    elif kind == 2:  # the last one is empty, of any shape
        entry = max(entries, key=lambda entry: entry["data_offsets"])
        start = entry["data_offsets"][0]
        body = body[:start]
        entry |= {
            "data_offsets": [start, start],
            "shape": random.choice(([0], [10**18, 0], [2**62, 2**62, 0], [0] * 70)),
        }
    else:
        start, end = entry["data_offsets"]
        entry["dtype"], size = random.choice(
            (("BOOL", 1), ("U8", 1), ("F8_E4M3", 1), ("BF16", 2), ("I32", 4), ("F64", 8))
        )
        count = (end - start) // size
        last = random.choice([n for n in range(1, 65) if count % n == 0])
        entry["shape"] = random.choice(([count], [count // last, last], [count // last, 1, last], [1, count]))
    return join_safetensors(header, body)
