"""The pictures of the benchmarks, from their rows. Only these functions need matplotlib; none needs a display."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from proxsparse.run.sections import number

GRAY = "#5f6670"
FORMS = {"dense": "dense", "sparse": "packed", "sparse8": "packed, 8 bits", "sparse4": "packed, 4 bits"}  # of a model
FAR = 3  # times the largest perplexity of a run: what is larger is not drawn
EARLY = 0.1  # the share of the steps after which the paper calls a mask early
SWEPT = {  # setting -> label of the axis
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
Series = dict[str, list[tuple[object, float, str]]]  # name -> the points (x, y, text beside it)


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


def panels(count: int, width: float, height: float, title: str, columns: int = 4) -> list:
    """Axes of this size in inches, at most `columns` in a row, under a title."""
    from matplotlib.figure import Figure

    across, down = min(columns, count), -(-count // columns)
    figure = Figure((width * across, height * down + 0.6), dpi=130, layout="constrained")
    figure.suptitle(title.replace("; ", "\n"), size=9)
    found = figure.subplots(down, across, squeeze=False).flatten()
    for axes in found[count:]:
        axes.set_visible(False)
    for axes in found[:count]:
        axes.spines[["top", "right"]].set_visible(False)
    return list(found[:count])


def chart(
    title: str,
    parts: Sequence[tuple[str, str, Series]],
    ylabel: str,
    size: tuple[float, float],
    bars: bool = False,
    levels: dict[str, float] | None = None,
    **scales,
):
    """A figure with a panel for each (title, label of x, series): lines, or bars grouped by x.

    Args:
        levels: name -> y of a horizontal line in every panel; NaN: only its name, in the legend.
        scales: further arguments of `Axes.set`, such as yscale.
    """
    from matplotlib.ticker import LogFormatter

    grid = panels(len(parts), *size, title)
    for axes, (name, xlabel, series) in zip(grid, parts, strict=True):
        groups = list(dict.fromkeys(x for points in series.values() for x, *_ in points))
        width = 0.8 / max(1, len(series))
        for place, (label, points) in enumerate(series.items()):
            x, y, texts = zip(*points, strict=True)
            if bars:
                x = [groups.index(one) - 0.4 + (place + 0.5) * width for one in x]
                axes.bar(x, y, width, label=label)
            else:
                axes.plot(x, y, marker="o" if len(points) < 20 else "", markersize=4, label=label)
            for where, text in zip(zip(x, y, strict=True), texts, strict=True):
                if math.isfinite(where[1]):
                    axes.annotate(text, where, (0, 3), textcoords="offset points", ha="center", size=7)
        if bars:
            axes.set_xticks(range(len(groups)), groups, fontsize=8)
        for label, value in (levels or {}).items():
            axes.axhline(value, color=GRAY, linestyle="--", linewidth=1, label=label)
        axes.set(xlabel=xlabel, ylabel=ylabel, **scales)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_formatter(LogFormatter())  # 20, not 2 x 10^1
                axis.set_minor_formatter(LogFormatter())
        axes.set_title(name, fontsize=9)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for axes in grid[:-1]:
        if [*map(str, axes.get_legend().get_texts())] == [*map(str, grid[-1].get_legend().get_texts())]:
            axes.get_legend().remove()  # the last panel has the same
    return grid[0].figure


def prox_speed(rows: list[dict]):
    """Share of the copy's speed for the first weight and pattern: a group per backend, a bar per dtype and lambda."""
    first = rows[0]["weights"], rows[0].get("pattern", "2:4")  # older rows are 2:4
    rows = [row for row in rows if (row["weights"], row.get("pattern", "2:4")) == first and "p20_ms" in row]
    rows = [row for row in rows if "note" not in row]
    series: Series = {}
    for row in rows:
        if row["kernel"] != "copy":
            point = row["kernel"], row["share_of_copy"], f"{row['share_of_copy']:.0%}"
            series.setdefault(f"{row['dtype']}, λ = {row['lambda']:g}", []).append(point)
    title = f"{first[1]} prox in place, {first[0]}, {rows[0]['device']}"
    return chart(title, [("", "", series)], "share of the speed of a copy", (7, 3.4), bars=True, levels={"copy": 1})


def linear_speed(rows: list[dict]):
    """A panel for each weight and dtype, a line for each backend (without prepared weights): speedup over dense."""
    parts: dict[str, Series] = {}
    for row in rows:
        if "times_dense" in row and row["backend"] != "dense" and ":" not in row["backend"]:
            series = parts.setdefault(f"{row['weights']}, {row['dtype']}", {})
            series.setdefault(row["backend"], []).append((row["rows"], row["times_dense"], ""))
    cases = [(name, "rows of x", series) for name, series in parts.items()]
    title = f"packed 2:4 linear layer, {rows[0]['device']}"
    return chart(title, cases, "speedup over dense", (3, 2.4), levels={"dense": 1}, xscale="log") if cases else None


def generate_speed(rows: list[dict]):
    """A panel for each model and dtype, a bar for each form with each pattern, batch and mode; the text is its speed
    relative to dense there."""
    parts: dict[str, Series] = {}
    for row in rows:
        series = parts.setdefault(f"{row['model']}, {row['layers']} blocks, {row['dtype']}", {})
        ratio = row.get("decode_times_dense_of_mode") if row["form"] != "dense" else None
        case = f"{row['pattern']}\n{row['mode']}\nbatch {row['batch']}"
        point = case, row["decode_tokens_per_s"], f"{ratio:.1f}x" if ratio else ""
        series.setdefault(FORMS.get(row["form"], row["form"]), []).append(point)
    cases = [(name, "", series) for name, series in parts.items()]
    title = "packed compared with dense; " + rows[0]["device"] if rows else ""
    return chart(title, cases, "decode tokens/s", (4.2, 3.2), bars=True) if cases else None


def bits_quality(rows: list[dict]):
    """Perplexity with 16 bits against arithmetic, and with 16, 8 and 4 bits against the bits of a weight: a color for
    each pattern of each name."""
    by_arithmetic: Series = {}
    by_size: Series = {}
    for row in sorted(rows, key=lambda row: (-row["arithmetic"], row["name"], row["bits"])):
        if row["bits"] <= 3 or "GPTQ" in row["form"]:  # dense weights with 3 bits would compress the picture
            continue
        form = f"{row['form']} ({row['arithmetic']:.2f})" if row["form"] == "mixed" else row["form"]
        line = form if form == "dense" else f"{form}, {row['name']}" + ", updated weights" * row["updated"]
        by_size.setdefault(line, []).append((row["bits_a_weight"], row["perplexity"], str(row["bits"])))
        if row["bits"] == 16:
            by_arithmetic[line] = [(row["arithmetic"], row["perplexity"], form)]
    parts = [("16 bits", "arithmetic (dense: 1)", by_arithmetic)]
    parts += [("16, 8 and 4 bits", "bits a weight, in all", by_size)]
    title = "{model}: perplexity on {windows} windows of {seq_len} tokens of {data}".format_map(rows[0])
    return chart(title, parts, "perplexity", (4.5, 3.6), yscale="log")


def budget(rows: list[dict]):
    """A line for each path: perplexity against minutes; the text is the number of tokens, if the run counts them."""
    series: Series = {}
    for row in rows:
        text = f"{row['tokens'] / 1000:,.0f}k" if row["tokens"] else ""
        point = row["minutes"], row["perplexity"], text
        series.setdefault(f"{row['path']}: {row['values']} values", []).append(point)
    levels = {"dense": max(row["dense"] or 0 for row in rows) or math.nan}
    part = ("", "minutes (the numbers are tokens of text)", series)
    return chart(budget_title(rows), [part], "perplexity", (9, 4.5), levels=levels, xscale="log", yscale="log")


def budget_title(rows: list[dict]) -> str:
    """Pattern, model, text and devices."""
    devices = " or ".join(sorted({row["device"] for row in rows}))
    return "{pattern}, {model}; {windows} windows of {seq_len} tokens of {data}; ".format_map(rows[0]) + devices


def measured_on(row: dict) -> str:
    """Model and data of a study in one line."""
    scores = row["perplexity"]
    old = [f"{name} {row[name]}" for name in ("scaling", "forward") if name in row]  # rows before 2026-11-25
    text = ", ".join([row["model"], *(old or [f"objective {row['objective']}"]), f"calibrated on {row['data']}"])
    return text + (f"; {scores['windows']} windows of {scores['seq_len']} tokens of {scores['data']}" if scores else "")


def swept(rows: list[dict]) -> tuple[str, list[str]]:
    """The label of the axis, and each run's value (lambda_1 itself, not the factor of the sweep) with its tokens."""
    name = next(name for row in rows for name in row["settings"])
    tokens = [f"\n{row['tokens']:,} tokens" if name == "num_samples" else "" for row in rows]
    values = [next(iter(row["settings"].values()), row["cell"]) for row in rows]
    return SWEPT[name], [value + more for value, more in zip(values, tokens, strict=True)]


def perplexities(rows: list[dict], title: str):
    """The perplexity of each run: a bar for a named cell, a point for a swept number.

    The dense model and the magnitude mask are horizontal lines. A magnitude mask far above all runs would compress the
    picture: then only the legend has it.
    """
    named, found = rows[0]["study"] == "constraints", rows[0]["perplexity"]
    label, places = ("", [row["cell"] for row in rows]) if named else swept(rows)
    values = [row["perplexity"]["proxsparse"] for row in rows]
    points = [(x, math.nan if y is None else y, number(y)) for x, y in zip(places, values, strict=True)]
    most = FAR * max((y for _, y, _ in points if math.isfinite(y)), default=math.inf)
    known = {f"{name}: {number(found[name])}": found[name] for name in ("dense", "magnitude")}
    levels = {name: y if y <= most else math.nan for name, y in known.items() if y is not None}
    text, part = f"{title}; {measured_on(rows[0])}", ("", label, {"learned mask": points})
    return chart(text, [part], "perplexity", (8, 4), named, levels, yscale="linear" if named else "log")


def curves(rows: list[dict], title: str):
    """Left each run over its steps, right all of them early and at the end."""
    (label, shares), (xlabel, places) = CURVES[rows[0]["study"]], swept(rows)
    runs = {x: [(step, y, "") for step, y in row["curve"]] for x, row in zip(places, rows, strict=True)}
    ends: Series = {}
    for share in shares:
        name = "at the end" if share == 1 else f"after {share:.0%} of the steps"
        values = [min(row["curve"], key=lambda point: abs(point[0] - share * row["curve"][-1][0]))[1] for row in rows]
        ends[name] = [(x, y, number(y)) for x, y in zip(places, values, strict=True)]
    parts = [("", "optimizer step", runs), ("", xlabel, ends)]
    return chart(f"{title}; {measured_on(rows[0])}", parts, label, (5.5, 4))
