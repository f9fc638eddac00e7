"""report.md, the plots and the model card of a run.

They are made only from metrics.jsonl (one row per step) and result.json (absent until the run has ended).
"""

import fnmatch
import io
import json
import math
import reprlib
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

from proxsparse.errors import InputError
from proxsparse.io.atomic import write_file
from proxsparse.run.model_card import APPLY_MASKS, card_text, is_edited, sealed
from proxsparse.run.sections import (
    MEASURED_ON,
    duration,
    number,
    perplexity_text,
    settings_text,
    share,
    shortened,
    table,
    top_text,
)
from proxsparse.runtime.progress import phase

MOST = 2**63  # larger integers do not occur in a run, and may be too large for a float
PLOTTABLE = 1e30  # larger values overflow in matplotlib's axes
NUMBER = (int, float, type(None))  # NaN and infinity are null in strict JSON
METRICS_KEYS = {NUMBER: ["step", "loss"]}  # type -> keys
RESULT_KEYS = {
    str: ["status", "version", "model", "data", "pattern", "command", "masks_sha256"],
    **{int: ["layers", "weights", "steps", "tokens"], (int, float): ["seconds"], NUMBER: ["peak_memory_bytes"]},
    **{dict: ["config", "environment"], list: ["warnings"], (dict, type(None)): ["perplexity"]},
}
# What a method adds.
ADDED_KEYS = {
    "proxsparse": {
        **{str: ["objective"], NUMBER: ["feasible_share", "magnitude_agreement"]},
        **{dict: ["reg_lambda"], list: ["mask_similarity"]},
    },
    "finetune": {dict: ["held_out"], int: ["trained_weights"]},
}
TITLES = {"proxsparse": "ProxSparse {0} masks for {1}", "finetune": "{1}, {0}, fine-tuned"}
SCORES = {"proxsparse": ["dense", "magnitude", "proxsparse"], "finetune": ["pruned", "finetune"]}
FILES = {
    "masks.safetensors": "the masks, one bit per weight",
    "model*.safetensors*": "the pruned model's weights",
    "*config.json": "the configuration of the model and the tokenizer, for `from_pretrained`",
    "tokenizer.*": "the tokenizer",
    "config.yaml": "the flags of the run; --config repeats it",
    "metrics.jsonl": "one row per step; the data of the plots",
    "result.json": "the results of the run in JSON",
    "report.md": "this page; its plots are *.png",
    "README.md": "the model card",
}
PLOTS = {  # file -> title, y axis, its limits, key of a row
    "loss.png": ("Training loss", "loss (nats per token)", (None, None), "loss"),
    "held_out_loss.png": ("Held-out loss", "loss (nats per token)", (None, None), "held_out_loss"),
    "feasible_share.png": ("Blocks that already satisfy N:M", "share of sampled blocks", (0, 1.02), "feasible_share"),
    "mask_similarity.png": ("Mask bits equal to the final mask", "share of mask bits", (None, None), "to_final"),
    "norm_gap.png": ("Distance of the kept weights from pretrained", "‖W - W₀‖ / ‖W₀‖", (0, None), "norm_gap"),
}
DARK, LIGHT, GRID = "#1b5e8c", "#9fc3dc", "#dfe3e6"


def write_report(run_dir: Path) -> None:
    """Writes the files of `report_files` into `run_dir`, each atomically."""
    with phase("report") as current:
        for name, content in report_files(run_dir).items():
            write_file(Path(run_dir) / name, content)
        current.result = "wrote report.md"


def report_files(run_dir: Path) -> dict[str, bytes]:
    """Name -> content of report.md, the plots and, if there is a result.json, the model card unless it was edited.

    The run may be complete, interrupted or still running.

    Raises:
        InputError: no such folder, no metrics.jsonl, or a malformed file; names the file and the line.
    """
    run_dir = Path(run_dir)
    rows, result = read_metrics(run_dir), read_result(run_dir)
    plots = draw_plots(rows, result)
    names = {path.name for path in run_dir.iterdir()} | {"report.md", *(plots or {})}
    names |= {"README.md"} if result else set()
    try:
        card = sealed(card_text(result).encode()) if result else b""
        page = report_text(rows, result, plots, names).encode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise InputError(f"{run_dir / 'result.json'}: cannot be shown ({error}); fix or delete the file") from error
    texts = {"README.md": card, "report.md": page} if result else {"report.md": page}
    if is_edited(run_dir / "README.md"):
        texts.pop("README.md", None)
    return {**(plots or {}), **texts}


def read_metrics(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl, without an incomplete last line, which a run may still be writing."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        reason = "no metrics.jsonl in this folder" if run_dir.is_dir() else "not a folder"
        raise InputError(f"{run_dir}: {reason}; give the --output_dir of `proxsparse train`")
    lines = path.read_bytes().splitlines()
    rows = []
    for index, line in enumerate(lines, 1):
        try:
            where = f"{path}, line {index}"
            row = parsed(line, METRICS_KEYS, where)
            rows.append(checked(row, {NUMBER: [key for *_, key in PLOTS.values() if key in row]}, where))
        except InputError:
            if index < len(lines):
                raise
    return rows


def read_result(run_dir: Path) -> dict | None:
    """The content of result.json, or None if there is none."""
    path = run_dir / "result.json"
    if not path.is_file():
        return None
    result = parsed(path.read_bytes(), RESULT_KEYS, str(path))
    method = method_of(result)
    checked(result, ADDED_KEYS[method], str(path))
    if result["perplexity"] is not None:
        texts = [key for key in ("data", "bos") if key == "data" or key in result["perplexity"]]
        scores = [key for key in result["perplexity"] if key not in texts]
        numbers = [*MEASURED_ON[1:4], *SCORES[method], *scores]
        checked(result["perplexity"], {str: texts, NUMBER: numbers}, f"{path}, perplexity")
    if method == "proxsparse":
        checked(result["reg_lambda"], {NUMBER: ["min", "max"]}, f"{path}, reg_lambda")
        for point in result["mask_similarity"]:
            checked(point, {NUMBER: ["step", "to_final"]}, f"{path}, mask_similarity")
    return result


def method_of(result: dict) -> str:
    """The method that trained: "proxsparse", or "finetune"."""
    return "finetune" if result.get("method") == "finetune" else "proxsparse"


def parsed(text: bytes, schema: dict, where: str) -> dict:
    try:
        record = json.loads(text, parse_int=integer)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({error}); fix or delete the file") from error
    return checked(record, schema, where)


def integer(digits: str) -> int:
    """An integer of JSON. Raises ValueError if it is too large."""
    if abs(value := int(digits)) >= MOST:
        raise ValueError(f"{digits:.20}... is out of range")
    return value


def checked(record: object, schema: dict, where: str) -> dict:
    """Returns `record`. Raises InputError unless it is a JSON object with the keys and types of `schema`."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object, found {reprlib.repr(record)}; fix or delete the file")
    missing = object()
    wrong = [key for types, keys in schema.items() for key in keys if not isinstance(record.get(key, missing), types)]
    if wrong:
        raise InputError(f"{where}: {', '.join(wrong)} missing or of wrong type; use the version that wrote the file")
    return record


def figures_text(result: dict) -> str:
    memory = result["peak_memory_bytes"]
    return table(
        ("quantity", "value"),
        ("steps", number(result["steps"])),
        ("tokens", number(result["tokens"])),
        ("time (h:min:s)", duration(result["seconds"])),
        ("layers pruned", number(result["layers"])),
        ("weights in these layers", number(result["weights"])),
        *added_figures(result),
        ("peak memory", "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"),
        ("SHA-256 of the masks (names and packed bits)", f"`{result['masks_sha256']}`"),
        ("proxsparse", result["version"]),
        *result["environment"].items(),
    )


def added_figures(result: dict) -> list[tuple[str, str]]:
    """The rows of the table of figures that only one method has."""
    if method_of(result) == "finetune":
        best = result["held_out"].get("best_step")
        return [
            ("weights that were trained", number(result["trained_weights"])),
            ("step with the smallest held-out loss, whose weights were kept", number(best)),
        ]
    return [
        (f"blocks that were {result['pattern']} before the final projection", share(result["feasible_share"])),
        ("mask bits equal to those of the magnitude mask", share(result["magnitude_agreement"])),
    ]


def report_text(rows: Sequence[dict], result: dict | None, plots: dict | None, names: Collection[str]) -> str:
    """The text of report.md. `plots`: None without matplotlib; `names`: the files in the folder."""
    title = "ProxSparse run"
    if result:
        title = TITLES[method_of(result)].format(result["pattern"], shortened(result["model"]))
    parts = [f"# {title}", top_text(rows, result)]
    if result:
        parts += ["## Held-out perplexity", perplexity_text(result["perplexity"])]
    no_plots = "No plots: `pip install matplotlib`, then `proxsparse report` on this folder."
    pictures = [no_plots] if plots is None else [f"![{PLOTS[name][0]}]({name})" for name in plots]
    parts += ["## Training", *pictures]
    if result:
        parts += ["## Measurements", figures_text(result)]
        parts += ["## Command and settings", f"```sh\n{result['command']}\n```", settings_text(result)]
    found = ((sorted(fnmatch.filter(names, pattern)), what) for pattern, what in FILES.items())
    files = [(", ".join(f"`{name}`" for name in have), what) for have, what in found if have]
    parts += ["## Files", table(("file", "content"), *files)]
    return "\n\n".join(parts + [APPLY_MASKS] * ("masks.safetensors" in names)) + "\n"


def draw_plots(rows: Sequence[dict], result: dict | None) -> dict[str, bytes] | None:
    """File name -> PNG for every plot with at least one finite value; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    drawn = {}
    for name, (title, y_label, limits, key) in PLOTS.items():
        points = rows if key != "to_final" else (result or {}).get("mask_similarity", ())
        x, y = ([plottable(point[k]) for point in points if key in point] for k in ("step", key))
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
    """The value, or NaN (a gap in the line) if it cannot be drawn."""
    return value if value is not None and abs(value) < PLOTTABLE else math.nan
