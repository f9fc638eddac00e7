"""The picture of linear_speed.py: how many times as fast as dense, over the rows of x."""

from pathlib import Path

COLUMNS = 4


def plot(rows: list[dict], file: Path) -> None:
    """A panel for each weight and dtype, a line for each backend (not for "cutlass:prepared"); above 1 sparse wins."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {file.name}: matplotlib is missing; remedy: pip install matplotlib")
        return
    rows = [row for row in rows if row["state"] == "cold" and "times_dense" in row]
    rows = [row for row in rows if row["backend"] != "dense" and ":" not in row["backend"]]
    panels = list(dict.fromkeys((row["dtype"], row["weights"]) for row in rows))
    if not panels:
        return
    names = sorted({row["backend"] for row in rows})
    columns, lines = min(COLUMNS, len(panels)), -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(1 + 3 * columns, 0.7 + 2.4 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, squeeze=False).flatten()
    for axes, (dtype, weights) in zip(grid, panels, strict=False):
        for number, name in enumerate(names):
            points = [row for row in rows if (row["dtype"], row["weights"], row["backend"]) == (dtype, weights, name)]
            x, y = [row["rows"] for row in points], [row["times_dense"] for row in points]
            axes.plot(x, y, marker="o", markersize=3, color=f"C{number}", label=name)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{weights}, {dtype}", fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("rows of x", fontsize=9)
    figure.supylabel("times as fast as dense", fontsize=9)
    figure.suptitle(f"packed 2:4 linear layer, {rows[0]['device']}", fontsize=10)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right upper")
    figure.savefig(file, dpi=120)
    print(f"drawn {file}")
