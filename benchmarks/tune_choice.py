"""Which launch parameters a sweep has shown to be the fastest, and tuned.json, which keeps them (tune.py).

Parameters replace a kernel's own defaults only if they are faster by more than the noise, which is the spread of the
times of the defaults: they are measured at least twice, first and last. A wrong result is never chosen.

Where a kernel is measured at two strengths lambda (the prox), the first one decides: the fastest there, unless others
are within 2% of it; among those, the fastest at the second one.
"""

import json
import math
import os
from collections import defaultdict
from pathlib import Path

from proxsparse.ops import tuning

LEAST_NOISE = 0.01  # two equal times may agree by chance
CLOSE = 1.02
LAMBDA_MEAN = "lambda_mean"  # lambda times the mean of |w|: what the cost of a prox depends on


def key(parameters: dict[str, object]) -> str:
    """Parameters as text, to compare them; "{}" are the defaults."""
    return json.dumps(parameters, sort_keys=True)


DEFAULT = key({})


def times(rows: list[dict]) -> dict[str, dict[str, list[float]]]:
    """condition -> parameters as text -> the times in ms, of rows that have one, in the order of the rows."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "p50_ms" in row:
            found[row["condition"]][key(row["parameters"])].append(row["p50_ms"])
    return found


def noise(ms: list[float]) -> float:
    """How far two times may differ by chance, as a share: the spread of equal measurements."""
    return max(LEAST_NOISE, max(ms) / min(ms) - 1) if len(ms) > 1 else math.inf


def chosen_parameters(rows: list[dict]) -> dict[str, object] | None:
    """The parameters for one kernel and size: {} for its defaults; None if too little was measured to choose.

    Args:
        rows: `condition` ("" if there is only one), `parameters`, and `p50_ms` unless it failed.
    """
    of = times(rows)
    conditions = [condition for condition in of if len(of[condition][DEFAULT]) > 1]
    if not conditions:
        return None
    bad = {key(row["parameters"]) for row in rows if "note" in row}
    first, last = conditions[0], conditions[-1]
    names = [name for name in of[first] if name not in bad and all(of[other][name] for other in conditions)]
    at = {condition: {name: min(of[condition][name]) for name in names} for condition in conditions}
    if DEFAULT not in names:
        return None
    fastest = min(at[first].values())
    close = [name for name in names if at[first][name] <= CLOSE * fastest] if first != last else names
    best = min(close, key=at[last].get)
    gains = {condition: at[condition][DEFAULT] / at[condition][best] - 1 for condition in conditions}
    limits = {condition: noise(of[condition][DEFAULT]) for condition in conditions}
    is_faster = gains[first] > limits[first] or (gains[first] >= -limits[first] and gains[last] > limits[last])
    return json.loads(best if is_faster else DEFAULT)


def cuda_from(rows: list[dict]) -> dict[str, float] | None:
    """{"cuda_from": x}: CUDA is faster than Triton from lambda * mean|w| = x on; {}: nowhere; None: too few rows.

    Faster means: at every measured lambda from there on, by more than the noise of Triton's times.
    """
    of, threshold = times(rows), {}
    triton, cuda = key({"backend": "triton"}), key({"backend": "cuda"})
    strengths = {row["condition"]: row[LAMBDA_MEAN] for row in rows if "p50_ms" in row}
    if any("note" in row for row in rows) or not all(of[known][triton] and of[known][cuda] for known in strengths):
        strengths = {}  # a backend that fails anywhere is not chosen
    if not strengths:
        return None
    for condition in sorted(strengths, key=strengths.get, reverse=True):
        gain = min(of[condition][triton]) / min(of[condition][cuda]) - 1
        if gain <= noise(of[condition][triton]):
            break
        threshold = {"cuda_from": strengths[condition]}
    return threshold


def write_tuned(kind: str, kernel: str, measured: dict[str, object], fastest: dict[str, dict]) -> None:
    """Puts the entry of one kernel and dtype on one kind of device into tuned.json, and leaves all others.

    A size where the defaults are the fastest has {}: without it the parameters of the nearest size would be taken.
    The file is replaced as a whole, so that a reader finds the old one or the new one.
    """
    file: Path = tuning.TUNED
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    table.setdefault(kind, {})[kernel] = {"measured": measured, "fastest": fastest}
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(file)
    tuning.forget()
