"""The picture of generate_speed.py: decode tokens per second of dense and sparse, and the ratio on top."""

from pathlib import Path

COLOURS = {"dense": "tab:gray", "sparse": "tab:blue"}


def plot(rows: list[dict], file: Path) -> None:
    """A panel for each model and dtype: a pair of bars for each batch and mode."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {file.name}: matplotlib is missing; remedy: pip install matplotlib")
        return
    panels = list(dict.fromkeys((row["model"], row["dtype"], row["layers"]) for row in rows))
    figure = Figure(figsize=(1.5 + 3.6 * len(panels), 3.8), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        here = [row for row in rows if (row["model"], row["dtype"], row["layers"]) == panel]
        groups = list(dict.fromkeys((row["batch"], row["mode"]) for row in here))
        for offset, (form, colour) in zip((-0.2, 0.2), COLOURS.items(), strict=True):
            bars = {(row["batch"], row["mode"]): row for row in here if row["form"] == form}
            x = [place + offset for place in range(len(groups))]
            drawn = axes.bar(x, [bars[group]["decode_tokens_per_s"] for group in groups], 0.4, label=form, color=colour)
            if form == "sparse":
                labels = [f"{bars[group]['decode_times_dense']:.2f}x" for group in groups]
                axes.bar_label(drawn, labels, fontsize=7)
        axes.set_xticks(range(len(groups)), [f"{mode}\nbatch {batch}" for batch, mode in groups], fontsize=7)
        axes.set_title(f"{panel[0]}, {panel[2]} blocks, {panel[1]}", fontsize=9)
    grid[0].set_ylabel("decode tokens/s")
    figure.suptitle(f"packed 2:4 against dense, {rows[0]['device']}", fontsize=10)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right upper")
    figure.savefig(file, dpi=120)
    print(f"drawn {file}")
