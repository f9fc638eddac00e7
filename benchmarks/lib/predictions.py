"""Adds the predictions for an H100 and an H200 (predictions.yaml) to the rows of the benchmarks."""

import functools
from pathlib import Path

import yaml

KINDS = ("H100", "H200")  # the order of the values
FIELDS = ("predicted_share", "predicted_times_dense")


@functools.cache
def predictions() -> list[dict]:
    """The entries of predictions.yaml."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def predictions_for(benchmark: str, row: dict[str, object]) -> dict[str, float]:
    """predicted_share and predicted_times_dense of a row, as far as they were predicted for its device."""
    kind = next((number for number, name in enumerate(KINDS) if name in str(row.get("device", ""))), None)
    found, row = {}, row | {"benchmark": benchmark}
    for known in predictions() if kind is not None else ():
        if all(name in row and fits(row[name], wanted) for name, wanted in known["for"].items()):
            found |= {field: known[field][kind] for field in FIELDS if field in known}
    return {field: value for field, value in found.items() if value is not None}


def fits(value: object, wanted: object) -> bool:
    """Whether a field of a row is the wanted value, one of a list, or in a range such as "9..16"."""
    if isinstance(wanted, str) and ".." in wanted:
        low, high = map(int, wanted.split(".."))
        return isinstance(value, int) and low <= value <= high
    return value in wanted if isinstance(wanted, list) else value == wanted
