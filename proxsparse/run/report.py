"""report.md and the plots of a run.

They are made only from metrics.jsonl (one row per logged step) and result.json (absent until the run has ended).
"""

import io
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from proxsparse.errors import InputError
from proxsparse.io.atomic import write_file
from proxsparse.io.output_folder import METRICS, RESULT
from proxsparse.run.sections import duration, number, page, perplexity_text, share, table, top_text
from proxsparse.runtime.progress import phase

FIGURES = {  # key of result.json -> name and format in the report; the methods have different ones
    "steps": ("steps", number),
    "tokens": ("tokens", number),
    "seconds": ("time (h:min:s)", duration),
    "layers": ("layers pruned", number),
    "weights": ("weights in these layers", number),
    "kept": ("weights kept in these layers", share),
    "arithmetic": ("arithmetic of the packed linear layers (dense: 1)", number),
    "bytes_a_weight": ("bytes a weight of the packed linear layers in bf16 (dense: 2)", number),
    "trained_weights": ("weights that were trained", number),
    "best_step": ("step with the smallest held-out loss, whose weights were kept", number),
    "feasible_share": ("blocks that were N:M before the final projection", share),
    "magnitude_agreement": ("mask bits equal to those of the magnitude mask", share),
    "peak_memory_bytes": ("peak memory", lambda size: "n/a" if size is None else f"{size / 2**30:.2f} GiB"),
    "masks_sha256": ("SHA-256 of the masks (names and packed bits)", lambda digest: f"`{digest}`"),
    "version": ("proxsparse", str),
}
PLOTS = {  # file -> title, y axis, its limits, key of a row
    "loss.png": ("Training loss", "loss (nats per token)", (None, None), "loss"),
    "held_out_loss.png": ("Held-out loss", "loss (nats per token)", (None, None), "held_out_loss"),
    "feasible_share.png": ("Blocks that already satisfy N:M", "share of sampled blocks", (0, 1.02), "feasible_share"),
    "mask_similarity.png": ("Mask bits equal to the final mask", "share of mask bits", (None, None), "to_final"),
    "norm_gap.png": ("Distance of the kept weights from pretrained", "‖W - W₀‖ / ‖W₀‖", (0, None), "norm_gap"),
}
DARK, LIGHT, GRID = "#1b5e8c", "#9fc3dc", "#dfe3e6"


def write_report(run_dir: Path) -> list[str]:
    """Writes report.md and the plots of a complete, interrupted or running run, each atomically. Returns their names.

    Raises:
        InputError: no metrics.jsonl, or a malformed file.
    """
    with phase("report") as current:
        path = run_dir / RESULT
        try:
            rows, result = read_metrics(run_dir), json.loads(path.read_bytes()) if path.is_file() else None
            plots = draw_plots(rows, result.get("mask_similarity", ()) if result else ())
            files = (plots or {}) | {"report.md": report_text(rows, result, plots).encode(errors="replace")}
        except InputError:
            raise
        except Exception as error:  # of many types: any value of the files may be missing or of another type
            reason = f"{METRICS} or {RESULT} cannot be shown ({type(error).__name__}: {error})"
            raise InputError(f"{run_dir}: {reason}; delete the damaged line or file") from error
        for name, content in files.items():
            write_file(run_dir / name, content)
        current.result = "wrote report.md"
    return list(files)


def read_metrics(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl, without an incomplete last line, which a run may still be writing."""
    path = run_dir / METRICS
    if not path.is_file():
        reason = "the run has not logged a step yet, or trains nothing; wait, or give the --output_dir of another run"
        raise InputError(f"{run_dir}: no metrics.jsonl: {reason}")
    rows = []
    for number_of_line, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            if line.endswith(b"\n"):
                rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            what = f"{path}, line {number_of_line}: not valid JSON ({error})"
            raise InputError(f"{what}; delete this line") from error
    return rows


def report_text(rows: Sequence[dict], result: dict | None, plots: dict | None) -> str:
    """The text of report.md. `plots`: None without matplotlib."""
    pictures = [f"![{PLOTS[name][0]}]({name})" for name in plots or {}]
    if plots is None:
        pictures = ["No plots: `pip install matplotlib`, then `proxsparse report` on this folder."]
    if result is None:
        reason = "There is no result.json: the run is still in progress, or was stopped before it was complete."
        last = f", the last with loss {number(rows[-1]['loss'])}" if rows else ""
        top = f"> **Warning:** {reason} This page shows {rows[-1]['step'] if rows else 0:,} finished steps{last}."
        return page("# Report of a run", top, "## Training", *pictures)
    values = result.get("held_out", {}) | result
    figures = [(name, shown(values[key])) for key, (name, shown) in FIGURES.items() if key in values]
    return page(
        f"# {result['model']}, {result['pattern']}: report of {result['method']}",
        top_text(result),
        f"```sh\n{result['command']}\n```\n\nREADME.md has the settings.",
        "## Held-out perplexity",
        perplexity_text(result["perplexity"]),
        "## Training",
        *pictures,
        "## Measurements",
        table(("quantity", "value"), *figures, *result["environment"].items()),
    )


def draw_plots(rows: Sequence[dict], similarity: Sequence[dict]) -> dict[str, bytes] | None:
    """File name -> PNG for every plot with a finite value; None without matplotlib. `similarity`: for the last plot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    drawn = {}
    for name, (title, y_label, limits, key) in PLOTS.items():
        points = [point for point in (similarity if key == "to_final" else rows) if point.get(key) is not None]
        x, y = ([point[k] for point in points] for k in ("step", key))
        if not any(map(math.isfinite, y)):
            continue
        axes = Figure((6, 3.5), dpi=110, layout="constrained").add_subplot(xlabel="optimizer step", ylabel=y_label)
        if key == "loss":
            axes.plot(x, y, color=LIGHT, linewidth=0.8, label="each logged step")
            window = max(5, min(100, len(y) // 20))
            y = [statistics.fmean(y[max(0, end - window) : end]) for end in range(1, len(y) + 1)]
            axes.plot([], color=DARK, linewidth=2, label=f"mean of {window}")
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
