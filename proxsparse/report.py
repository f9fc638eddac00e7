"""Run directory -> report.md, plots and a model card: `python -m proxsparse.report RUN_DIR` rebuilds them at any time.

Everything is made from metrics.jsonl (one row a step) and result.json (absent until the run has ended) alone.
"""

import argparse
import fnmatch
import io
import json
import math
import os
import re
import reprlib
import statistics
import sys
from collections.abc import Collection, Sequence
from datetime import timedelta
from pathlib import Path

import yaml

from proxsparse.checkpoint import write_file
from proxsparse.errors import InputError, run_command
from proxsparse.output_folder import MARKER, read_marker
from proxsparse.reading import files_to_read, require_unchanged

MOST = 2**63  # an integer beyond is no figure of a run, and too large for a float
PLOTTABLE = 1e30  # beyond it the axes' arithmetic overflows
NUMBER = (int, float, type(None))  # a writer of strict JSON turns NaN and infinity into null
METRICS_KEYS = {NUMBER: ["step", "loss", "feasible_share", "norm_gap"]}  # type -> keys
RESULT_KEYS = {
    str: ["status", "version", "model", "data", "pattern", "metric", "command", "masks_sha256"],
    **{int: ["layers", "weights", "steps", "tokens"], (int, float): ["seconds"]},
    NUMBER: ["feasible_share", "magnitude_agreement", "peak_memory_bytes"],
    **{dict: ["config", "reg_lambda", "environment"], list: ["mask_similarity", "warnings"]},
    (dict, type(None)): ["perplexity"],
}
MEASURED_ON = ("data", "seq_len", "windows", "tokens")
PERPLEXITY_KEYS = {str: ["data"], NUMBER: [*MEASURED_ON[1:], "dense", "magnitude", "proxsparse"]}
NAMES = {"dense": "dense (pretrained)", "magnitude": "magnitude mask", "proxsparse": "ProxSparse mask"}
FILES = {
    "masks.safetensors": "the learned masks, packed to bits",
    "model*.safetensors*": "the pruned model's weights",
    "*config.json": "the model's and the tokenizer's settings, for `from_pretrained`",
    "tokenizer.*": "the tokenizer",
    "config.yaml": "every setting of the run",
    "metrics.jsonl": "one row a step, behind the plots",
    "result.json": "what the run produced, for programs",
    "report.md": "this page, with its plots *.png",
    "README.md": "the model card",
}
PLOTS = {  # file -> title, y axis, its limits, key of a row
    "loss.png": ("Training loss", "loss (nats per token)", (None, None), "loss"),
    "feasible_share.png": ("Blocks that already satisfy N:M", "share of sampled blocks", (0, 1.02), "feasible_share"),
    "mask_similarity.png": ("Mask bits equal to the final mask", "share of mask bits", (None, None), "to_final"),
    "norm_gap.png": ("Drift of the kept weights from pretrained", "‖W - W₀‖ / ‖W₀‖ (no unit)", (0, None), "norm_gap"),
}
DARK, LIGHT, GRID = "#1b5e8c", "#9fc3dc", "#dfe3e6"
APPLY_MASKS = """\
masks.safetensors holds, under each layer's name, `numpy.packbits(mask, axis=-1, bitorder="little")` as uint8
[out_features, ceil(in_features / 8)]; a bit of 1 is a kept weight. To apply the masks to the pretrained `model`:

```python
import numpy, torch
from safetensors.numpy import load_file

for name, bits in load_file("masks.safetensors").items():
    weight = model.get_submodule(name).weight
    mask = numpy.unpackbits(bits, axis=-1, bitorder="little", count=weight.shape[-1]).astype(bool)
    weight.data = torch.where(torch.from_numpy(mask).to(weight.device), weight.data, 0.0)
```"""


def write_report(run_dir: Path) -> None:
    """Writes the files of `report_files` into `run_dir`; every file is replaced in one piece."""
    for name, content in report_files(run_dir).items():
        write_file(Path(run_dir) / name, content)


def report_files(run_dir: Path) -> dict[str, bytes]:
    """Name -> content of report.md, the plots and, once result.json is there, the model card README.md.

    Works on a finished, an interrupted and a running run.

    Raises:
        InputError: no such folder, no metrics.jsonl, or a malformed file (named with the line).
    """
    run_dir = Path(run_dir)
    rows, result = read_metrics(run_dir), read_result(run_dir)
    plots = draw_plots(rows, result)
    names = {path.name for path in run_dir.iterdir()} | {"report.md", *(plots or {})}
    names |= {"README.md"} if result else set()
    try:
        card = card_text(result).encode() if result else b""
        page = report_text(rows, result, plots, names).encode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise InputError(f"{run_dir / 'result.json'}: cannot be shown ({error}); mend or remove it") from error
    texts = {"README.md": card, "report.md": page} if result else {"report.md": page}
    return {**(plots or {}), **texts}


def write_card(run_dir: Path, result: dict) -> None:
    """Writes the model card README.md alone, for a run that has no steps to report. `result` as in `card_text`."""
    write_file(run_dir / "README.md", card_text(result).encode(errors="replace"))


def read_metrics(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl; an unreadable last line is one that the run is still writing, and is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        reason = "holds no metrics.jsonl" if run_dir.is_dir() else "is not a folder"
        raise InputError(f"{run_dir} {reason}; give the folder that proxsparse.train wrote (its --output_dir)")
    lines = path.read_bytes().splitlines()
    rows = []
    for index, line in enumerate(lines, 1):
        try:
            rows.append(parsed(line, METRICS_KEYS, f"{path}, line {index}"))
        except InputError:
            if index < len(lines):
                raise
    return rows


def read_result(run_dir: Path) -> dict | None:
    """result.json, or None while there is none."""
    path = run_dir / "result.json"
    if not path.is_file():
        return None
    result = parsed(path.read_bytes(), RESULT_KEYS, str(path))
    checked(result["reg_lambda"], {NUMBER: ["min", "max"]}, f"{path}, reg_lambda")
    if result["perplexity"] is not None:
        scores = [key for key in result["perplexity"] if key != "data"]
        checked(
            result["perplexity"], {**PERPLEXITY_KEYS, NUMBER: PERPLEXITY_KEYS[NUMBER] + scores}, f"{path}, perplexity"
        )
    for point in result["mask_similarity"]:
        checked(point, {NUMBER: ["step", "to_final"]}, f"{path}, mask_similarity")
    return result


def parsed(text: bytes, schema: dict, where: str) -> dict:
    try:
        record = json.loads(text, parse_int=integer)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({error}); mend or remove it") from error
    return checked(record, schema, where)


def integer(digits: str) -> int:
    """An integer of JSON. Raises ValueError for one that is no figure of a run."""
    if abs(value := int(digits)) >= MOST:
        raise ValueError(f"{digits:.20}... is out of range")
    return value


def checked(record: object, schema: dict, where: str) -> dict:
    """`record`, if it is a JSON object with these keys of these types."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object, found {reprlib.repr(record)}; mend or remove it")
    missing = object()
    wrong = [key for types, keys in schema.items() for key in keys if not isinstance(record.get(key, missing), types)]
    if wrong:
        raise InputError(f"{where}: {wrong} missing or of the wrong type; use the proxsparse version that wrote it")
    return record


def number(value: float | None) -> str:
    """Four significant digits, thousands separated: 20.68, 3,015; null is "n/a"."""
    if value is None:
        return "n/a"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.4f} %"


def duration(seconds: float) -> str:
    """h:min:s; "n/a" for what is no time, such as NaN."""
    try:
        return str(timedelta(seconds=round(seconds)))
    except (ValueError, OverflowError):
        return "n/a"


def shortened(value: object) -> object:
    """An absolute path loses its folders: these pages get published, the layout of a home folder should not."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def table(*rows: Sequence[object]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def top_text(rows: Sequence[dict], result: dict | None) -> str:
    """What a reader must know first: how the run ended, a mask that is no better, the run's warnings, the verdict."""
    if result is None:
        reason = "There is no result.json: the run is still going, or it was ended before it was complete."
        last = f", the last with loss {number(rows[-1]['loss'])}" if rows else ""
        return f"> **Warning:** {reason} This page shows {len(rows):,} finished steps{last}."
    found = []
    if result["status"] != "complete":
        found.append(f"The run was {result['status']} after {number(result['steps'])} steps; the masks are from there.")
    scores, verdict = result["perplexity"], "Held-out perplexity was not measured."
    if scores is not None and "proxsparse" not in scores:
        verdict = f"Held-out perplexity {number(scores[result['method']])}, against {number(scores['dense'])} dense."
    elif scores is not None:
        learned, magnitude = scores["proxsparse"], scores["magnitude"]
        verdict = f"Held-out perplexity {number(learned)}, against {number(magnitude)} for the magnitude mask"
        verdict += f" and {number(scores['dense'])} dense."
        learned, magnitude = (math.inf if x is None or math.isnan(x) else x for x in (learned, magnitude))
        if learned >= magnitude and not any("than the magnitude mask" in str(text) for text in result["warnings"]):
            word = "no better" if learned == magnitude else "worse"
            found.append(f"The learned mask is {word} than the magnitude mask, which needs no training: do not use it.")
    lines = [f"> **Warning:** {' '.join(str(text).split())}" for text in (*found, *result["warnings"])]
    return "\n>\n".join(lines) + f"\n\n**{verdict}**" if lines else f"**{verdict}**"


def perplexity_text(scores: dict | None) -> str:
    if scores is None:
        return "Not measured."
    windows = f"{number(scores['windows'])} windows of {number(scores['seq_len'])} tokens"
    values = ((NAMES.get(key, key), number(value)) for key, value in scores.items() if key not in MEASURED_ON)
    scored = table(("weights", "perplexity"), *values)
    return f"{scored}\n\n{shortened(scores['data'])}; {windows}, {number(scores['tokens'])} tokens. Lower is better."


def settings_text(result: dict) -> str:
    rows = [(f"`{key}`", "not set" if value is None else shortened(value)) for key, value in result["config"].items()]
    if "reg_lambda" in result:
        low, high = number(result["reg_lambda"]["min"]), number(result["reg_lambda"]["max"])
        rows.append(("regularisation strength used", low if low == high else f"{low} to {high}, by layer"))
    data = shortened(result["data"]) if result.get("samples") != 0 else "none needed"
    return f"Calibration data: {data}.\n\n{table(('setting', 'value'), *rows)}"


def figures_text(result: dict) -> str:
    memory = result["peak_memory_bytes"]
    return table(
        ("figure", "value"),
        ("steps", number(result["steps"])),
        ("tokens", number(result["tokens"])),
        ("time (h:min:s)", duration(result["seconds"])),
        ("layers pruned", number(result["layers"])),
        ("weights in these layers", number(result["weights"])),
        (f"blocks whose learned weights were {result['pattern']} by themselves", share(result["feasible_share"])),
        ("mask bits equal to the magnitude mask's", share(result["magnitude_agreement"])),
        ("peak memory", "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"),
        ("SHA-256 of the masks (names and packed bits)", f"`{result['masks_sha256']}`"),
        ("proxsparse", result["version"]),
        *result["environment"].items(),
    )


def report_text(rows: Sequence[dict], result: dict | None, plots: dict | None, names: Collection[str]) -> str:
    """The text of report.md; `plots` is None without matplotlib, `names` are the files in the folder."""
    title = f"ProxSparse {result['pattern']} masks for {shortened(result['model'])}" if result else "ProxSparse run"
    parts = [f"# {title}", top_text(rows, result)]
    if result:
        parts += ["## Held-out perplexity", perplexity_text(result["perplexity"])]
    no_plots = "No plots: `pip install matplotlib`, then `python -m proxsparse.report` on this folder."
    runs = result["config"].get("average_runs") if result else 1
    several = isinstance(runs, int) and runs > 1
    again = [f"Learning begins anew with each of {runs} runs; their mean is kept."] if several else []
    pictures = [no_plots] if plots is None else [f"![{PLOTS[name][0]}]({name})" for name in plots]
    parts += ["## Training", *again, *pictures]
    if result:
        parts += ["## Figures", figures_text(result)]
        parts += ["## What was run", f"```sh\n{result['command']}\n```", settings_text(result)]
    found = ((sorted(fnmatch.filter(names, pattern)), what) for pattern, what in FILES.items())
    files = [(", ".join(f"`{name}`" for name in have), what) for have, what in found if have]
    parts += ["## Files", table(("file", "what it is"), *files)]
    return "\n\n".join(parts + [APPLY_MASKS] * ("masks.safetensors" in names)) + "\n"


def card_text(result: dict) -> str:
    """The text of README.md: front matter for the hub, then what the model is, how good, how made, how to use it.

    Of any method: `result` is what result.json holds, of proxsparse.train or of proxsparse.prune.
    """
    model, pattern = shortened(result["model"]), result["pattern"]
    learned = "steps" in result
    method, credit = "ProxSparse", "ProxSparse (ICML 2025) learned which."
    if not learned:
        method, credit = result["method"], f"`{result['method']}` ({result['paper']}) chose which."
    kept_share = f"{pattern.replace(':', ' of every ')} consecutive weights kept"
    if result.get("allocation", "uniform") != "uniform":
        kept_share += f" on average (`{result['allocation']}` shared them out among the decoder blocks)"
    kept = "has a new value" if result.get("updated") else "is the pretrained one, unchanged"
    length = f"{number(result['steps'])} steps, {number(result['tokens'])} tokens. " if learned else ""
    on_hub = re.fullmatch(r"\w[\w.-]{,95}/[\w.-]{1,96}", model, re.ASCII) and not Path(model).exists()  # owner/name
    head = {"base_model": model} if on_hub else {}
    head |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = [pattern, "semi-structured-sparsity", "pruned", "proxsparse"]
    return f"""\
---
{yaml.safe_dump(head, sort_keys=False)}---

# {Path(model).name}, pruned to {pattern} with {method}

{top_text((), result)}

{model} with {kept_share} in {number(result["layers"])} linear layers;
{credit} A kept weight {kept}, and every other weight of these
layers is +0.0. All other parameters are the pretrained ones, whose licence and limitations apply.

## Held-out perplexity

{perplexity_text(result["perplexity"])}

## How to use it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on the hub
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
```

## How it was made

{length}{settings_text(result)}

SHA-256 of the masks (names and packed bits): `{result["masks_sha256"]}`
"""


def draw_plots(rows: Sequence[dict], result: dict | None) -> dict[str, bytes] | None:
    """File name -> PNG for every plot that has a finite value to show; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    drawn = {}
    for name, (title, y_label, limits, key) in PLOTS.items():
        points = rows if key != "to_final" else result["mask_similarity"] if result else ()
        x, y = ([plottable(point[k]) for point in points] for k in ("step", key))
        if not any(map(math.isfinite, y)):
            continue
        axes = Figure((6, 3.5), dpi=110, layout="constrained").add_subplot(xlabel="optimizer step", ylabel=y_label)
        if key == "loss":
            axes.plot(x, y, color=LIGHT, linewidth=0.8, label="each step")
            window = max(5, min(100, len(y) // 20))
            y = [statistics.fmean(y[max(0, end - window) : end]) for end in range(1, len(y) + 1)]
            axes.plot([], color=DARK, linewidth=2, label=f"mean of {window} steps")
            axes.legend(frameon=False)
        axes.plot(x, y, color=DARK, linewidth=2, marker="." if len(y) <= 30 else "")
        axes.set_ylim(*limits)
        axes.set_title(title, loc="left", weight="bold", size=11)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(color=GRID)
        axes.spines[["top", "right"]].set_visible(False)
        png = io.BytesIO()
        axes.figure.savefig(png, format="png")
        drawn[name] = png.getvalue()
    return drawn


def plottable(value: float | None) -> float:
    """NaN, which is a gap in the line, for what cannot be drawn."""
    return value if value is not None and abs(value) < PLOTTABLE else math.nan


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m proxsparse.report", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="the folder that proxsparse.train wrote (its --output_dir)")
    run_dir = parser.parse_args(arguments).run_dir
    refuse_foreign(run_dir)
    before = files_to_read(run_dir)
    files = report_files(run_dir)
    require_unchanged(run_dir, before)
    for name, content in files.items():
        write_file(run_dir / name, content)
    require_unchanged(run_dir, before)


def refuse_foreign(run_dir: Path) -> None:
    """Raises InputError if a page or plot would replace a file that no run has written."""
    marked = read_marker(run_dir) is not None if run_dir.is_dir() else False
    for path in (run_dir / name for name in ("report.md", "README.md", *PLOTS)):
        if os.path.lexists(path) and not (marked and path.is_file() and not path.is_symlink()):
            reason = "is a link or a folder" if marked else f"is in a folder that no run has marked (no {MARKER})"
            raise InputError(f"{path} {reason}, and the report would replace it; move it away")


if __name__ == "__main__":
    sys.exit(run_command(main))
