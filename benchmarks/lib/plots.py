"""The pictures of the benchmarks, from their rows. Only these functions need matplotlib; none needs a display."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path

BLUE, ORANGE, GRAY, GRID = "#1b5e8c", "#d9822b", "#5f6670", "#dfe3e6"
FORMS = {  # form of a model -> its name and color
    "dense": ("dense", "silver"),
    "sparse": ("2:4", "tab:blue"),
    "sparse8": ("2:4, 8 bits", "tab:orange"),
    "sparse4": ("2:4, 4 bits", "tab:red"),
}
MAPS = ("Blues", "Oranges", "Greens", "Purples")
OUTSIDE = {"frameon": False, "fontsize": 8, "loc": "upper left", "bbox_to_anchor": (1, 1)}
FAR = 3  # times the largest perplexity of a run: what is larger is not drawn
EARLY = 0.1  # the share of the steps after which the paper calls a mask early
AXES = {  # setting -> label of the axis
    "reg_lambda_rel": "λ₁ · mean|w|   (no unit; inf: projection after every step)",
    "reg_lambda": "λ₁   (1 / unit of a weight; inf: projection after every step)",
    "frozen_lambda": "λ₂   (no unit; inf: kept weights reset after every step)",
    "num_samples": "calibration samples",
}
CURVES = {  # study -> label of its curve, and the shares of the steps at which the runs are compared
    "convergence": ("share of N:M blocks", (EARLY, 1.0)),
    "early_mask": ("share of mask bits equal to the final mask", (EARLY,)),
    "norm_gap": ("‖W - W₀‖ / ‖W₀‖ of the kept weights (no unit)", (EARLY, 1.0)),
}


def draw(file: Path, picture: Callable[[], object]) -> None:
    """Writes the figure that `picture()` makes (None: nothing to draw), or prints that matplotlib is missing."""
    try:
        figure = picture()
    except ImportError:
        print(f"no {file.name}: matplotlib is missing; install it with pip install matplotlib")
        return
    if figure is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
        print(f"drawn {file}")


def panels(count: int, width: float, height: float, title: str, subtitle: str = "", columns: int = 4) -> list:
    """Axes of this size in inches, at most `columns` in a row, under a title."""
    from matplotlib.figure import Figure

    across, down = min(columns, count), -(-count // columns)
    figure = Figure((width * across, height * down + 0.6), dpi=130, layout="constrained")
    figure.suptitle("\n".join([title, *filter(None, subtitle.split("; "))]), size=9)
    found = figure.subplots(down, across, squeeze=False).flatten()
    for axes in found[count:]:
        axes.set_visible(False)
    for axes in found[:count]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return list(found[:count])


def grouped_bars(
    axes,
    groups: Sequence[str],
    series: dict[str, list[float]],
    labels: dict[str, list[str]],
    colors: Iterable,
    horizontal: bool = False,
) -> None:
    """In every group one bar for each series, with its label.

    Args:
        series: name -> its values, one for each group; NaN: no bar.
    """
    bar, ticks = (axes.barh, axes.set_yticks) if horizontal else (axes.bar, axes.set_xticks)
    width = 0.8 / max(1, len(series))
    for number, ((name, values), color) in enumerate(zip(series.items(), colors, strict=False)):
        places = [group - 0.4 + (number + 0.5) * width for group in range(len(groups))]
        drawn = bar(places, values, width, label=name, color=color)
        axes.bar_label(drawn, labels[name], fontsize=7, padding=2)
    ticks(range(len(groups)), groups, fontsize=8)


def number(value: float | None, digits: int = 4) -> str:
    """Significant digits; null, for a value that is not finite or was not measured, is n/a."""
    return "n/a" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def scale_of(values) -> str:
    """A logarithmic scale where the values need it."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return "log" if finite and max(finite) > 5 * min(finite) else "linear"


def distinct(rows: list[dict], *fields: str) -> list:
    """The values of a field, or tuples of several, each once, in the order of the rows."""
    return list(dict.fromkeys(row[fields[0]] if len(fields) == 1 else tuple(row[f] for f in fields) for row in rows))


def prox_speed(rows: list[dict]):
    """Share of the copy's speed for the first weight: a group for each backend, a bar for each dtype and lambda."""
    from matplotlib import colormaps

    rows = [row for row in rows if row["weights"] == rows[0]["weights"] and "p20_ms" in row and "note" not in row]
    names = [name for name in distinct(rows, "kernel") if name != "copy"]
    bars, dtypes = distinct(rows, "dtype", "lambda"), distinct(rows, "dtype")
    share = {(row["dtype"], row["lambda"], row["kernel"]): row["share_of_copy"] for row in rows}
    series = {f"{d}, λ = {x:g}": [share.get((d, x, name), math.nan) for name in names] for d, x in bars}
    labels = {name: [f"{value:.0%}" if math.isfinite(value) else "" for value in series[name]] for name in series}
    strengths = distinct(rows, "lambda")  # a colour for each dtype, darker for a larger lambda
    shade = {x: 0.2 + 0.7 * (place + 1) / (len(strengths) + 0.5) for place, x in enumerate(strengths)}
    colors = [colormaps[MAPS[dtypes.index(dtype) % len(MAPS)]](shade[x]) for dtype, x in bars]
    title = f"2:4 prox in place, {rows[0]['weights']}, {rows[0]['device']}"
    title += f", {names[0]}" if len(names) == 1 else ""
    (axes,) = panels(1, 3 + 2 * max(2, len(names)), 3.4, title)
    grouped_bars(axes, names if len(names) > 1 else [""], series, labels, colors)
    axes.tick_params(axis="x", length=0)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_ylabel("share of the speed of a copy")
    axes.legend(**OUTSIDE)
    return axes.figure


def linear_speed(rows: list[dict]):
    """A panel for each weight and dtype, a line for each backend (without prepared weights): speedup over dense."""
    rows = [row for row in rows if row["state"] == "cold" and "times_dense" in row]
    rows = [row for row in rows if row["backend"] != "dense" and ":" not in row["backend"]]
    if not rows:
        return None
    cases, names = distinct(rows, "dtype", "weights"), sorted(distinct(rows, "backend"))
    grid = panels(len(cases), 3, 2.4, f"packed 2:4 linear layer, {rows[0]['device']}")
    for axes, (dtype, weights) in zip(grid, cases, strict=True):
        for name in names:
            points = [row for row in rows if (row["backend"], row["dtype"], row["weights"]) == (name, dtype, weights)]
            x, y = ([row[field] for row in points] for field in ("rows", "times_dense"))
            axes.plot(x, y, marker="o", markersize=3, label=name)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{weights}, {dtype}", fontsize=9)
    figure = grid[0].figure
    figure.supxlabel("rows of x", fontsize=9)
    figure.supylabel("speedup over dense", fontsize=9)
    figure.legend(*grid[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


def generate_speed(rows: list[dict]):
    """A panel for each model and dtype, a bar for each form in each batch and mode.

    Sparse bars show the speed relative to the fastest dense form in the same mode.
    """
    if not rows:
        return None
    cases = distinct(rows, "model", "dtype", "layers")
    grid = panels(len(cases), 4.2, 3.2, f"packed 2:4 compared with dense, {rows[0]['device']}")
    for axes, case in zip(grid, cases, strict=True):
        here = {
            (row["batch"], row["mode"], row["form"]): row
            for row in rows
            if (row["model"], row["dtype"], row["layers"]) == case
        }
        groups = list(dict.fromkeys((batch, mode) for batch, mode, _ in here))
        series, labels = {}, {}
        for form, (name, _) in FORMS.items():
            if not any(row["form"] == form for row in rows):
                continue
            bars = [here.get((*group, form), {}) for group in groups]
            series[name] = [row.get("decode_tokens_per_s", math.nan) for row in bars]
            ratios = [row.get("decode_times_dense_of_mode") if form.startswith("sparse") else None for row in bars]
            labels[name] = ["" if ratio is None else f"{ratio:.1f}x" for ratio in ratios]
        names = [f"{mode}\nbatch {batch}" for batch, mode in groups]
        grouped_bars(axes, names, series, labels, [color for name, color in FORMS.values() if name in series])
        axes.set_title(f"{case[0]}, {case[2]} blocks, {case[1]}", fontsize=9)
    grid[0].set_ylabel("decode tokens/s")
    grid[-1].legend(**OUTSIDE)
    return grid[0].figure


def comparison(rows: list[dict]):
    """The perplexity of every method on every text, the rows of compare_methods.py."""
    names, texts = distinct(rows, "method"), distinct(rows, "data")
    found = {(row["method"], row["data"]): row["perplexity"] for row in rows}
    series = {text: [found.get((name, text)) or math.nan for name in names] for text in texts}
    labels = {text: [number(value) if math.isfinite(value) else "" for value in series[text]] for text in texts}
    subtitle = f"{rows[0]['model']}, {rows[0]['device']}"
    (axes,) = panels(1, 8, 0.8 + 0.32 * len(names) * len(texts), "Perplexity after pruning", subtitle)
    grouped_bars(axes, names, series, labels, itertools.cycle((BLUE, ORANGE, GRAY)), horizontal=True)
    axes.invert_yaxis()
    axes.set(xscale=scale_of(found.values()))
    axes.set_xlabel(f"perplexity, windows of {rows[0]['seq_len']} tokens ({axes.get_xscale()} scale)")
    axes.margins(x=0.12)
    if len(texts) > 1:
        axes.legend(**OUTSIDE)
    else:
        axes.set_title(texts[0], fontsize=9)
    return axes.figure


def bits_quality(rows: list[dict]):
    """A line for dense weights and for each 2:4 model: perplexity against the bits of a weight."""
    from matplotlib.ticker import LogLocator, NullFormatter

    first = rows[0]
    subtitle = f"{first['model']}; {first['windows']} windows of {first['seq_len']} tokens of {first['data']}"
    (axes,) = panels(1, 6.4, 4, "Perplexity and size of linear layers", subtitle)
    for name, form in distinct(rows, "name", "form"):
        points = [row for row in rows if (row["name"], row["form"]) == (name, form)]
        x, y = ([row[field] for row in points] for field in ("bits_a_weight", "perplexity"))
        label = name if form == "dense" else f"{form}, {name}"
        axes.plot(x, y, marker="o", markersize=4, label=label + ", updated weights" * points[0]["updated"])
    top = {(row["bits"], row["bits_a_weight"]): row["perplexity"] for row in sorted(rows, key=itemgetter("perplexity"))}
    for (bits, size), value in top.items():
        axes.annotate(f"{bits} bits", (size, value), xytext=(4, 5), textcoords="offset points", fontsize=7)
    axes.set(yscale=scale_of([row["perplexity"] for row in rows]))
    axes.yaxis.set_major_formatter("{x:g}")
    if axes.get_yscale() == "log":  # the default labels too few ticks of one decade, and overlapping ones of several
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bits a weight, with scales and places")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False, fontsize=8)
    return axes.figure


def learned(row: dict) -> float | None:
    """The perplexity with the learned mask."""
    return row["perplexity"] and row["perplexity"]["proxsparse"]


def measured_on(row: dict) -> str:
    """Model and data of a study in one line."""
    scores = row["perplexity"]
    text = f"{row['model']}, scaling {row['scaling']}, forward {row['forward']}, calibrated on {row['data']}"
    return text + (f"; {scores['windows']} windows of {scores['seq_len']} tokens of {scores['data']}" if scores else "")


def swept_axis(axes, rows: list[dict]) -> list[str]:
    """Ticks in equal steps for the swept values (of lambda_1 itself, not the factor of the sweep), which it returns."""
    values = [next(iter(row["settings"].values()), row["cell"]) for row in rows]
    tokens = [f"\n{row['tokens']:,} tokens" if "num_samples" in row["settings"] else "" for row in rows]
    axes.set_xticks(range(len(rows)), map("".join, zip(values, tokens, strict=True)))
    axes.set_xlabel(AXES[next(name for row in rows for name in row["settings"])])
    axes.margins(x=0.08)
    return values


def perplexities(rows: list[dict], title: str):
    """The perplexity of each run: a bar for a named cell, a line over a swept number.

    The dense model and the magnitude mask are horizontal lines. A magnitude mask far above all runs would compress the
    picture: then only the legend has it.
    """
    (axes,) = panels(1, 7.2, 4, title, measured_on(rows[0]))
    values = [math.nan if learned(row) is None else learned(row) for row in rows]
    if rows[0]["study"] == "constraints":
        axes.bar([row["cell"] for row in rows], values, color=BLUE, width=0.6)
    else:
        name = "pretrained weights, learned mask" if "finetuned" in rows[0] else None
        axes.plot(range(len(rows)), values, color=BLUE, linewidth=2, marker="o", label=name)
        swept_axis(axes, rows)
    annotate(axes, values)
    if "finetuned" in rows[0]:
        tuned = [row["finetuned"] for row in rows]
        axes.plot(range(len(rows)), tuned, color=ORANGE, linewidth=2, marker="o", label="fine-tuned: updated weights")
        annotate(axes, tuned, above=False)
    most = FAR * max((value for value in values if math.isfinite(value)), default=math.inf)
    lines = {"dense": rows[0]["perplexity"]["dense"], "magnitude mask": rows[0]["perplexity"]["magnitude"]}
    near = {name: value for name, value in lines.items() if value is not None and value <= most}
    axes.set_yscale(scale_of((*values, *near.values())))
    axes.set_ylabel(f"perplexity ({axes.get_yscale()} scale)")
    for (name, value), style in zip(lines.items(), ("--", ":"), strict=True):
        if name in near:
            axes.axhline(value, color=GRAY, linestyle=style, linewidth=1.2, label=f"{name}: {number(value)}")
        elif value is not None:
            axes.plot([], [], color="none", label=f"{name}: {number(value)}, outside the picture")
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return axes.figure


def curves(rows: list[dict], title: str):
    """Left each run over its steps, right all of them early and at the end."""
    from matplotlib import colormaps

    left, right = panels(2, 5.5, 4, title, measured_on(rows[0]))
    label, shares = CURVES[rows[0]["study"]]
    colors = colormaps["viridis"]([0.9 * i / max(1, len(rows) - 1) for i in range(len(rows))])
    for row, color, value in zip(rows, colors, swept_axis(right, rows), strict=True):
        left.plot(*zip(*row["curve"], strict=True), color=color, linewidth=1.8, label=value)
    left.set(xlabel="optimizer step", ylabel=label)
    left.legend(title=right.get_xlabel().partition("   ")[0], title_fontsize=8, **OUTSIDE)
    for share, color in zip(shares, (ORANGE, BLUE), strict=False):
        values = [min(row["curve"], key=lambda p: abs(p[0] - share * row["curve"][-1][0]))[1] for row in rows]
        name = "at the end" if share == 1 else f"after {share:.0%} of the steps"
        right.plot(range(len(rows)), values, color=color, linewidth=1.8, marker="o", label=name)
        annotate(right, values, above=share == 1, digits=3)
    right.set_ylabel(label)
    right.margins(y=0.15)
    right.legend(frameon=False, fontsize=8)
    return left.figure


def annotate(axes, values: list[float], above: bool = True, digits: int = 4) -> None:
    """Writes each value at its place."""
    where = {"textcoords": "offset points", "ha": "center", "va": "bottom" if above else "top", "size": 8}
    for place, value in enumerate(values):
        if value is not None and math.isfinite(value):
            axes.annotate(number(value, digits), (place, value), (0, 4 if above else -5), **where)
