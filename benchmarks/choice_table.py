"""What `auto` of SparseLinear takes, made from the rows of linear_speed.py: proxsparse/ops/measured.json."""

import json
from collections import defaultdict
from pathlib import Path

from proxsparse.errors import InputError
from proxsparse.ops import choice
from proxsparse.ops.registry import get_kernel, list_backends

ORIGIN = ("device", "torch", "commit", "command")


def update_choice(results: Path) -> None:
    """Writes the file that choice.py reads from the rows in `results`."""
    if not results.is_file():
        raise InputError(f"--update_choice: there is no {results}; measure first, without the flag")
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    kinds = choice_table(rows)
    choice.MEASURED.write_text(json.dumps(kinds, indent=1) + "\n", encoding="utf-8")
    choice.forget()
    for kind, dtypes in kinds.items():
        for dtype, entry in dtypes.items():
            print(f"{choice.MEASURED.name}: {kind}, {dtype}: {len(entry['fastest'])} shapes")


def choice_table(rows: list[dict]) -> dict[str, dict]:
    """Device kind -> dtype -> what was fastest, for every shape and number of rows, in the newest run that met it.

    The order of the keys is that of the sizes: the same rows give the same file.
    """
    points = defaultdict(list)
    for row in rows:
        if row["state"] == "cold" and "p50_ms" in row:
            shape = tuple(map(int, row["weights"].split("x")))
            points[row["device_kind"], row["dtype"], shape, row["rows"]].append(row)
    origins, fastest = defaultdict(list), defaultdict(lambda: defaultdict(dict))
    for (kind, dtype, shape, count), found in sorted(points.items()):
        newest = [row for row in found if row["when"] == max(row["when"] for row in found)]
        origins[kind, dtype] += newest
        fastest[kind, dtype]["{}x{}".format(*shape)][str(count)] = choice.ORDER.join(fastest_first(newest))
    table = {}
    for (kind, dtype), shapes in fastest.items():
        measured = {name: "; ".join(sorted({row[name] for row in origins[kind, dtype]})) for name in ORIGIN}
        measured["results"] = "benchmarks/results/linear_speed.jsonl"
        table.setdefault(kind, {})[dtype] = {"measured": measured, "fastest": shapes}
    return table


def fastest_first(rows: list[dict]) -> list[str]:
    """The backends that `auto` may take, up to the one that always serves: what is slower than that is left out.

    Rows of "cutlass:prepared" do not count: `auto` calls a backend without its own form.
    """
    ms = {row["backend"]: row["p50_ms"] for row in rows}
    free = [name for name in list_backends("sparse_linear") if not get_kernel("sparse_linear", name).needs_prepared]
    names = [name for name in sorted(ms, key=ms.get) if name in free]
    place = names.index(choice.REFERENCE) if choice.REFERENCE in names else len(names)
    return [*names[:place], choice.REFERENCE]
