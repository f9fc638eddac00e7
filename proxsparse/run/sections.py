"""Markdown sections that the report and the model card share."""

import math
import shlex
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

MEASURED_ON = ("data", "seq_len", "windows", "tokens", "bos")
BOS = {"each": ", bos before each", "first": ", bos before the first", "none": ""}  # where bos stands in the windows
NAMES = {
    "dense": "dense (pretrained)",
    "magnitude": "magnitude mask",
    "proxsparse": "ProxSparse mask",
    "pruned": "pruned, before fine-tuning",
    "finetune": "fine-tuned",
}


OTHERS = {"pruned": "before fine-tuning", "dense": "dense model"}


def number(value: float | None) -> str:
    """Four significant digits, with thousands separators: 20.68, 3,015; None is "n/a"."""
    if value is None:
        return "n/a"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.4f} %"


def duration(seconds: float) -> str:
    """h:min:s; "n/a" for values such as NaN."""
    try:
        return str(timedelta(seconds=round(seconds)))
    except (ValueError, OverflowError):
        return "n/a"


def shortened(value: object) -> object:
    """The file name of an absolute path, other values unchanged: published pages should not show home folders."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def shortened_command(command: str) -> str:
    """A command line with the file names of absolute paths only."""
    try:
        words = shlex.split(command)
    except ValueError:  # not a command line
        return ""
    parts = [word.partition("=") if word.startswith("--") else ("", "", word) for word in words]
    return shlex.join(f"{flag}{equals}{shortened(value)}" for flag, equals, value in parts)


def shareable(result: dict) -> dict:
    """The content of result.json with the file names of absolute paths only."""

    def walk(value):
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else shortened(value)

    return walk(result) | {"command": shortened_command(str(result.get("command", "")))}


def table(*rows: Sequence[object]) -> str:
    """A Markdown table; the first row is its header."""
    lines = ["| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def top_text(rows: Sequence[dict], result: dict | None) -> str:
    """The top of the page: warnings and the perplexity."""
    if result is None:
        reason = "There is no result.json: the run is still in progress, or was stopped before it was complete."
        last = f", the last with loss {number(rows[-1]['loss'])}" if rows else ""
        return f"> **Warning:** {reason} This page shows {len(rows):,} finished steps{last}."
    found = []
    if result["status"] != "complete":
        steps = number(result["steps"])
        found.append(f"The run was {result['status']} after {steps} steps; the model is the one learned so far.")
    scores, verdict = result["perplexity"], "Held-out perplexity was not measured."
    if scores is not None and "proxsparse" not in scores:
        others = [f"; {name}: {number(scores[key])}" for key, name in OTHERS.items() if key in scores]
        verdict = f"Held-out perplexity {number(scores[result['method']])}{''.join(others)}."
    elif scores is not None:
        learned, magnitude = scores["proxsparse"], scores["magnitude"]
        verdict = f"Held-out perplexity {number(learned)}; magnitude mask: {number(magnitude)}; "
        verdict += f"dense model: {number(scores['dense'])}."
        learned, magnitude = (math.inf if x is None or math.isnan(x) else x for x in (learned, magnitude))
        if learned >= magnitude and not any("than the magnitude mask" in str(text) for text in result["warnings"]):
            word = "no better" if learned == magnitude else "worse"
            found.append(f"The learned mask is {word} than the magnitude mask, which needs no training: do not use it.")
    lines = [f"> **Warning:** {' '.join(str(text).split())}" for text in (*found, *result["warnings"])]
    return "\n>\n".join(lines) + f"\n\n**{verdict}**" if lines else f"**{verdict}**"


def perplexity_text(scores: dict | None) -> str:
    if scores is None:
        return "Not measured."
    windows = (
        f"{number(scores['windows'])} windows of {number(scores['seq_len'])} tokens{BOS.get(scores.get('bos'), '')}"
    )
    values = ((NAMES.get(key, key), number(value)) for key, value in scores.items() if key not in MEASURED_ON)
    scored = table(("weights", "perplexity"), *values)
    return f"{scored}\n\n{shortened(scores['data'])}; {windows}, {number(scores['tokens'])} tokens. Lower is better."


def settings_text(result: dict) -> str:
    used = {"seq_len": result.get("seq_len"), "eval_seq_len": (result["perplexity"] or {}).get("seq_len")}
    settings = {key: used.get(key) if value is None else value for key, value in result["config"].items()}
    rows = [(f"`{key}`", "not set" if value is None else shortened(value)) for key, value in settings.items()]
    if "reg_lambda" in result:
        low, high = number(result["reg_lambda"]["min"]), number(result["reg_lambda"]["max"])
        rows.append(("lambda_1 of the run", low if low == high else f"{low} to {high}, by layer"))
    data = shortened(result["data"]) if result.get("samples") != 0 else "none needed"
    return f"Calibration data: {data}.\n\n{table(('setting', 'value'), *rows)}"
