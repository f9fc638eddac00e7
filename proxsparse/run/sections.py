"""Markdown sections that the report and the model card share."""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

MEASURED_ON = ("data", "seq_len", "windows", "tokens", "bos")  # of the perplexity entry; the others are scores
BOS = {"each": ", bos before each", "first": ", bos before the first", "none": ""}  # where bos stands in the windows
NAMES = {
    "dense": "dense model",
    "given": "given model",
    "magnitude": "magnitude mask",
    "proxsparse": "ProxSparse mask",
    "pruned": "before fine-tuning",
    "finetune": "fine-tuned",
}


def counted(patterns: Mapping[str, object]) -> str:
    """How many layers have each pattern; `patterns`: by layer name."""
    counts = Counter(map(str, patterns.values()))
    return ", ".join(f"{number(count)} x {pattern}" for pattern, count in sorted(counts.items()))


def number(value: float | None) -> str:
    """Four significant digits, with thousands separators: 20.68, 3,015; None is "n/a"."""
    if value is None:
        return "n/a"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "n/a" if value is None else f"{100 * value:.4f} %"


def duration(seconds: float) -> str:
    """h:min:s."""
    return str(timedelta(seconds=round(seconds)))


def shortened(value: object) -> object:
    """The file name of an absolute path, other values unchanged: shared files should not show home folders."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def shortened_command(command: str) -> str:
    """A command line with the file names of absolute paths only."""
    parts = [word.partition("=") if word.startswith("--") else ("", "", word) for word in shlex.split(command)]
    return shlex.join(f"{flag}{equals}{shortened(value)}" for flag, equals, value in parts)


def each_value(value: object, change: Callable[[object], object]) -> object:
    """The same dicts and lists, with `change` applied to every value in them."""
    if isinstance(value, dict):
        return {key: each_value(item, change) for key, item in value.items()}
    return [each_value(item, change) for item in value] if isinstance(value, list) else change(value)


def shareable(result: dict) -> dict:
    """The content of result.json with the file names of absolute paths only."""
    return each_value(result, shortened) | {"command": shortened_command(result["command"])}


def page(*parts: str) -> str:
    """A Markdown page of headings, paragraphs and tables."""
    return "\n\n".join(parts) + "\n"


def table(*rows: Sequence[object]) -> str:
    """A Markdown table; the first row is its header."""
    lines = ["| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def top_text(result: dict) -> str:
    """The top of a page: warnings and the perplexity."""
    warnings, scores = list(result["warnings"]), named_scores(result["perplexity"])
    if result["status"] != "complete":
        steps = number(result["steps"])
        warnings.insert(0, f"The run was {result['status']} after {steps} steps; the model is the one learned so far.")
    verdict = "; ".join(f"{name}: {number(score)}" for name, score in scores.items())
    verdict = f"Held-out perplexity of the {verdict}." if scores else "Held-out perplexity was not measured."
    lines = [f"> **Warning:** {' '.join(str(text).split())}" for text in warnings]
    return "\n>\n".join(lines) + "\n\n" * bool(lines) + f"**{verdict}**"


def named_scores(scores: dict | None) -> dict[str, float]:
    """What was measured -> its perplexity."""
    return {NAMES.get(key, key): value for key, value in (scores or {}).items() if key not in MEASURED_ON}


def windows_text(measured: dict) -> str:
    """What a perplexity was measured in, such as "12 windows of 2,048 tokens, bos before each"."""
    bos = BOS.get(measured.get("bos"), "")
    return f"{number(measured['windows'])} windows of {number(measured['seq_len'])} tokens{bos}"


def perplexity_text(scores: dict | None) -> str:
    """The table of perplexities, and what they were measured on."""
    if scores is None:
        return "Not measured."
    scored = table(("weights", "perplexity"), *((name, number(value)) for name, value in named_scores(scores).items()))
    return f"{scored}\n\n{scores['data']}; {windows_text(scores)}, {number(scores['tokens'])} tokens. Lower is better."


def cost_text(result: dict) -> str:
    """What the linear layers cost when they are packed."""
    cost = "{arithmetic:.2f} times the dense arithmetic and {bytes_a_weight:.2f} bytes a weight in bf16"
    return f"The linear layers of the decoder blocks, packed, need {cost.format_map(result)}"


def settings_text(result: dict) -> str:
    """The calibration data and the flags of a run."""
    used = {name: result.get(name) for name in ("pattern", "seq_len", "teacher", "precision")}
    used |= {"eval_seq_len": (result["perplexity"] or {}).get("seq_len")}
    settings = {
        key: used.get(key, value) if value in (None, "auto") else value for key, value in result["config"].items()
    }
    rows = [(f"`{key}`", "not set" if value is None else value) for key, value in settings.items()]
    if "reg_lambda" in result:
        low, high = number(result["reg_lambda"]["min"]), number(result["reg_lambda"]["max"])
        rows.append(("lambda_1 of the run", low if low == high else f"{low} to {high}, by layer"))
    data = result["data"] if result.get("samples") != 0 else "none needed"
    return f"Calibration data: {data}.\n\n{table(('setting', 'value'), *rows)}"
