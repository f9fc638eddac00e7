"""What a budget of text and time buys: the perplexity of finished runs against their minutes.

    python benchmarks/budget.py runs/best runs/admm+runs/tuned

Each argument is an output folder of `proxsparse train`, `prune` or `finetune` that has measured a perplexity. The
folders of runs that continue each other are joined by +: their minutes are added. Minutes include all evaluations.

Rows are appended to results/budget.jsonl. results/budget_<model>_<pattern>.png shows all runs in the file with the
model, pattern and text of the first argument, a line for each path.
"""

import sys
from functools import partial
from pathlib import Path

from lib import common, plots
from lib.runs import label, result_of

from proxsparse.errors import InputError, run_command

COLUMNS = {
    "path": "{path}",
    "values": "{values}",
    "samples": "{samples:,}",
    "tokens": "{tokens:,}",
    "minutes": "{minutes:.0f}",
    "perplexity": "{perplexity:.2f}",
    "times dense": "{times_dense:.3f}",
}
SAME = ("model", "pattern", "data", "seq_len", "windows")


def main(arguments: list[str] | None = None) -> None:
    """Appends a row for each argument; prints and draws all rows with the model, pattern and text of the first."""
    parser = common.new_parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="DIR[+DIR]", help="output folders of finished runs")
    rows, file = list(map(row_of, parser.parse_args(arguments).runs)), common.results_file("budget")
    common.append_rows(file, rows)
    same = [row for row in common.read_rows(file) if all(row[key] == rows[0][key] for key in SAME)]
    newest = {row["run"]: row for row in same}  # a run that is named again
    found = sorted(newest.values(), key=lambda row: (row["path"], row["tokens"] or 0))
    print(f"\n{plots.budget_title(found)}\n\n{common.table(COLUMNS, found)}\n")
    picture = f"budget_{rows[0]['model']}_{rows[0]['pattern'].replace(':', 'of')}.png"
    plots.draw(file.with_name(picture), partial(plots.budget, found))


def row_of(folders: str) -> dict:
    """The row of finished runs, DIR[+DIR]; the last one has measured the perplexity. Raises InputError for others."""
    results = []
    for folder in folders.split("+"):
        results.append(result_of(Path(folder)))
        if results[-1] is None or results[-1]["status"] != "complete":
            raise InputError(f"{folder}: not the output folder of a finished run")
    first, last = results[0], results[-1]
    scores = last["perplexity"] or {}
    name = "finetune" if "finetune" in scores else last["method"]
    if name not in scores:
        raise InputError(f"{folder}: its perplexity was not measured; run it with --eval_data")
    methods = [*(result["method"] for result in results), *["finetune"] * (name != last["method"])]
    return last["environment"] | {
        "commit": common.commit(),
        "run": last["run_id"],
        "command": "; ".join(result["command"] for result in results),
        "path": ", then ".join(methods),
        "values": "updated" if last["updated"] else "pretrained",
        "model": label(first["model"]),
        "pattern": last["pattern"],
        **{key: scores[key] for key in ("data", "seq_len", "windows")},
        **{key: last.get(key) for key in ("samples", "tokens")},
        "minutes": sum(result["seconds"] for result in results) / 60,
        "perplexity": scores[name],
        "dense": scores.get("dense"),  # unknown if `finetune` had no teacher
        "times_dense": scores[name] / scores["dense"] if "dense" in scores else None,
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
