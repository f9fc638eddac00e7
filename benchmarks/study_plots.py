"""The pictures of studies.py, from its rows alone. matplotlib is needed from here on only, and no display."""

import io
import itertools
import math

BLUE, ORANGE, GRAY, GRID = "#1b5e8c", "#d9822b", "#5f6670", "#dfe3e6"
FAR = 3  # times the largest perplexity of a run: what lies beyond is not drawn
EARLY = 0.1  # share of the steps after which the paper calls a mask early
AXES = {  # setting -> what stands under the axis
    "reg_lambda_rel": "λ₁ · mean|w|   (no unit; inf: projection after every step)",
    "reg_lambda": "λ₁   (1 / unit of a weight; inf: projection after every step)",
    "frozen_lambda": "λ₂   (no unit; inf: kept weights reset after every step)",
    "num_samples": "calibration samples",
}
CURVES = {  # study -> what it follows over the steps, and the shares of the steps at which the runs are compared
    "convergence": ("share of N:M blocks", (EARLY, 1.0)),
    "early_mask": ("share of mask bits equal to the final mask", (EARLY,)),
    "norm_gap": ("‖W - W₀‖ / ‖W₀‖ of the kept weights (no unit)", (EARLY, 1.0)),
}


def number(value: float | None, digits: int = 4) -> str:
    """Significant digits; null, which stands for what is not finite or was not measured, is n/a."""
    return "n/a" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def learned(row: dict) -> float | None:
    """The perplexity under the learned mask."""
    return row["perplexity"] and row["perplexity"]["proxsparse"]


def measured_on(row: dict) -> str:
    """Model and data of a study in one line."""
    scores = row["perplexity"]
    text = f"{row['model']}, metric {row['metric']}, forward {row['forward']}, calibrated on {row['data']}"
    return text + (f"; {scores['windows']} windows of {scores['seq_len']} tokens of {scores['data']}" if scores else "")


def value_of(row: dict) -> str:
    """The swept value: of lambda_1 itself rather than the factor of the sweep."""
    return next(iter(row["settings"].values()), row["cell"])


def axis_of(rows: list[dict]) -> str:
    """What was swept, for the axis."""
    return AXES[next(name for row in rows for name in row["settings"])]


# ---------------------------------------------------------------------------------------------- pictures


def bars(rows: list[dict], title: str):
    """The perplexity of each run as a bar."""
    axes = panels(title, rows, (7.2, 4.4))[0]
    values = heights(rows)
    axes.bar([row["cell"] for row in rows], values, color=BLUE, width=0.6)
    annotate(axes, values)
    perplexity_axis(axes, rows, values)
    return axes.figure


def line(rows: list[dict], title: str):
    """The perplexity over what was swept, in equal steps, so that 0 and infinity have a place."""
    axes = panels(title, rows, (7.2, 4.4))[0]
    values = heights(rows)
    axes.plot(range(len(rows)), values, color=BLUE, linewidth=2, marker="o")
    axes.set_xticks(range(len(rows)), [value_of(row) for row in rows])
    axes.set_xlabel(axis_of(rows))
    axes.margins(x=0.08)
    annotate(axes, values)
    perplexity_axis(axes, rows, values)
    return axes.figure


def curves(rows: list[dict], title: str):
    """Left each run over its steps, right all of them early and at the end."""
    import matplotlib

    left, right = panels(title, rows, (11, 4.6), 2)
    what, shares = CURVES[rows[0]["study"]]
    colors = matplotlib.colormaps["viridis"]([0.9 * i / max(1, len(rows) - 1) for i in range(len(rows))])
    for row, color in zip(rows, colors, strict=True):
        left.plot(*zip(*row["curve"], strict=True), color=color, linewidth=1.8, label=value_of(row))
    left.set(xlabel="optimizer step", ylabel=what)
    name = axis_of(rows).partition("   ")[0]
    left.legend(frameon=False, title=name, fontsize=8, title_fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for share, color in zip(shares, (ORANGE, BLUE), strict=False):
        values = [at_share(row["curve"], share) for row in rows]
        name = "at the end" if share == 1 else f"after {share:.0%} of the steps"
        right.plot(range(len(rows)), values, color=color, linewidth=1.8, marker="o", label=name)
        annotate(right, values, above=share == 1, digits=3)
    right.set_xticks(range(len(rows)), [value_of(row) for row in rows])
    right.set(xlabel=axis_of(rows), ylabel=what)
    right.margins(x=0.08, y=0.15)
    right.legend(frameon=False, fontsize=8)
    return left.figure


def comparison(rows: list[dict]):
    """The perplexity of every method on every text, the rows of compare_methods.py, as bars."""
    from matplotlib.figure import Figure

    names, texts = list(dict.fromkeys(row["method"] for row in rows)), list(dict.fromkeys(row["data"] for row in rows))
    found = {(row["method"], row["data"]): row["perplexity"] for row in rows}
    axes = Figure((8, 1.4 + 0.32 * len(names) * len(texts)), dpi=130, layout="constrained").add_subplot()
    height = 0.8 / len(texts)
    for index, (text, color) in enumerate(zip(texts, itertools.cycle((BLUE, ORANGE, GRAY)), strict=False)):
        places = [place + (index + 0.5) * height - 0.4 for place in range(len(names))]
        values = [found.get((name, text)) or math.nan for name in names]
        axes.barh(places, values, height, color=color, label=text)
        for place, value in zip(places, values, strict=True):
            if math.isfinite(value):
                axes.annotate(number(value), (value, place), (3, 0), textcoords="offset points", va="center", size=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xscale=scale_of(found.values()))
    axes.set_xlabel(f"perplexity, windows of {rows[0]['seq_len']} tokens ({axes.get_xscale()} scale)")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{rows[0]['model']}, {rows[0]['device']}", size=8, color=GRAY)
    axes.figure.suptitle("Perplexity after pruning", weight="bold", size=12)
    axes.legend(frameon=False, fontsize=8)
    return axes.figure


def at_share(curve: list, share: float) -> float:
    """The value of the [step, value] whose step is nearest to this share of the last step."""
    wanted = share * curve[-1][0]
    return min(curve, key=lambda point: abs(point[0] - wanted))[1]


# ---------------------------------------------------------------------------------------------- their parts


def panels(title: str, rows: list[dict], size: tuple[float, float], count: int = 1) -> list:
    """Axes side by side under the title and the line that says what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(size, dpi=130, layout="constrained")
    figure.suptitle(f"{title}\n", weight="bold", size=12)
    figure.text(0.5, 0.93 if size[1] > 4 else 0.9, measured_on(rows[0]), ha="center", va="center", size=8, color=GRAY)
    all_axes = [figure.add_subplot(1, count, place + 1) for place in range(count)]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GRID)
        axes.set_axisbelow(True)
    return all_axes


def heights(rows: list[dict]) -> list[float]:
    """The perplexities; what is not finite has no place in the picture."""
    return [math.nan if learned(row) is None else learned(row) for row in rows]


def annotate(axes, values: list[float], above: bool = True, digits: int = 4) -> None:
    """Each value beside its place."""
    where = {"textcoords": "offset points", "ha": "center", "va": "bottom" if above else "top", "size": 8}
    for place, value in enumerate(values):
        if value is not None and math.isfinite(value):
            axes.annotate(number(value, digits), (place, value), (0, 4 if above else -5), **where)


def perplexity_axis(axes, rows: list[dict], values: list[float]) -> None:
    """The label, the dense model and the magnitude mask as lines, and logarithms where the values need them.

    A magnitude mask far above all runs would press them together: then the legend alone has it.
    """
    lines = {"dense": rows[0]["perplexity"]["dense"], "magnitude mask": rows[0]["perplexity"]["magnitude"]}
    most = FAR * max((value for value in values if math.isfinite(value)), default=math.inf)
    near = {name: value for name, value in lines.items() if value is not None and value <= most}
    axes.set_yscale(scale_of((*values, *near.values())))
    axes.set_ylabel(f"perplexity ({axes.get_yscale()} scale)")
    for (name, value), style in zip(lines.items(), ("--", ":"), strict=True):
        if name in near:
            axes.axhline(value, color=GRAY, linestyle=style, linewidth=1.2, label=f"{name}: {number(value)}")
        elif value is not None:
            axes.plot([], [], color="none", label=f"{name}: {number(value)}, beyond the picture")
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def scale_of(values) -> str:
    """Logarithms where the values need them."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return "log" if finite and max(finite) > 5 * min(finite) else "linear"


def png(figure) -> bytes:
    """The picture as a file's content."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()
