"""The picture of generate_speed.py: decode tokens per second of every form, and the ratio to dense on top."""

from pathlib import Path

COLOURS = {"dense": "silver", "dense+merged": "tab:gray", "sparse": "tab:blue", "sparse+merged": "tab:green"}


def plot(rows: list[dict], file: Path) -> None:
    """A panel for each model and dtype: a bar for each form in each batch and mode."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {file.name}: matplotlib is missing; remedy: pip install matplotlib")
        return
    if not rows:
        return
    panels = list(dict.fromkeys((row["model"], row["dtype"], row["layers"]) for row in rows))
    forms = [form for form in COLOURS if any(row["form"] == form for row in rows)]
    width = 0.8 / max(1, len(forms))
    figure = Figure(figsize=(1.5 + 3.6 * len(panels), 3.8), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        here = [row for row in rows if (row["model"], row["dtype"], row["layers"]) == panel]
        groups = list(dict.fromkeys((row["batch"], row["mode"]) for row in here))
        for place, form in enumerate(forms):
            bars = [row for row in here if row["form"] == form]
            offset = (place - (len(forms) - 1) / 2) * width
            x = [groups.index((row["batch"], row["mode"])) + offset for row in bars]
            speeds = [row["decode_tokens_per_s"] for row in bars]
            drawn = axes.bar(x, speeds, width, label=form, color=COLOURS[form])
            if form.startswith("sparse"):
                labels = [f"{row['decode_times_dense']:.2f}x" if "decode_times_dense" in row else "" for row in bars]
                axes.bar_label(drawn, labels, fontsize=7)
        axes.set_xticks(range(len(groups)), [f"{mode}\nbatch {batch}" for batch, mode in groups], fontsize=7)
        axes.set_title(f"{panel[0]}, {panel[2]} blocks, {panel[1]}", fontsize=9)
    grid[0].set_ylabel("decode tokens/s")
    figure.suptitle(f"packed 2:4 against dense, {rows[0]['device']}", fontsize=10)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right upper")
    figure.savefig(file, dpi=120)
    print(f"drawn {file}")
