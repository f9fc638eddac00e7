"""The page that --plan prints: what one device holds, how many devices it takes, which flags make it fit."""

from dataclasses import replace
from typing import NamedTuple

from proxsparse.plan.cost import DEVICES, Cost, cost, sensible_devices
from proxsparse.plan.memory import (
    Buckets,
    Shape,
    Traced,
    dtypes_of,
    moment_dtype_of,
    on_device,
    on_host,
    runs_on_gpu,
    shape_of,
    traced,
)
from proxsparse.run.config import TrainConfig

CARDS = (24, 48, 80, 141)  # GB of a GPU's memory
AIMED_AT = (80, 48)
GB = 10**9


class Remedy(NamedTuple):
    """Flags that save memory, and what they cost."""

    settings: dict[str, object]
    price: str


REMEDIES = (  # the least harm to the result first
    Remedy({"gradient_checkpointing": True}, "the same result; the decoder blocks' forward pass is computed twice"),
    Remedy({"pretrained_weights": "cpu"}, "the same result; under the mask W0 comes from the host at every step"),
    Remedy({"update": "prunable"}, "embeddings, norms and lm_head stay; in the end they would become W0 again"),
    Remedy({"moment_dtype": "bf16"}, "AdamW's moments are rounded stochastically"),
    Remedy({"precision": "bf16", "master_weights": False}, "weights and gradients are rounded too"),
    Remedy({"average_runs": 1}, "one run instead of the mean of several"),
    Remedy(
        {"step_in_backward": True, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
        "the gradient is not clipped; every forward pass is a step",
    ),
    Remedy({"forward": "dense"}, "the paper's form: a copy of the weights less, and worse masks"),
)


def text(config: TrainConfig) -> str:
    """The page. Raises InputError for a model whose config cannot be had, or whose shape cannot be planned for."""
    shape = shape_of(config)
    found = traced(shape, config)
    moment, buckets = on_device(shape, config, found, 1)
    host = on_host(shape, config, 1)
    total = sum(buckets.values())
    parts = [
        heading(shape, config),
        f"One device, at its peak: {moment}\n{bucket_table(buckets)}",
        f"The host, beside every device\n{bucket_table(host)}",
        "" if runs_on_gpu(config) else f"On a CPU both are one: {gb(total + sum(host.values()))} GB resident.",
        f"On several devices\n{device_table(shape, config, found)}",
        "\n".join(remedies_for(shape, config, card) for card in AIMED_AT),
        NOTES,
    ]
    return "\n\n".join(part for part in parts if part)


NOTES = """\
GB = 10^9 bytes; what a card has beyond its name (an 80 GB H100: 85) is left for fragments. Activations are counted on
tensors without data, the rest is arithmetic. Times are estimates for H200s (989 TFLOP/s bf16, 4.8 TB/s, NVLink 450 GB/s
each way among 8, 50 GB/s a GPU beyond, 64 GB/s to the host), each used to 40%: assumed, not measured; docs/scaling.md
has the formulas. Not counted: a --start by another method, and what writing a checkpoint takes for a moment."""


def heading(shape: Shape, config: TrainConfig) -> str:
    """Which model, and how it is held."""
    weights, compute = (None if dtype is None else str(dtype).removeprefix("torch.") for dtype in dtypes_of(config))
    share = shape.prunable / shape.weights
    form = "learned under the mask" if config.forward == "masked" else "learned dense"
    return (
        f"{config.model}: {count(shape.weights)} weights in {shape.blocks} decoder blocks; {shape.layers} layers, "
        f"{share:.0%} of the weights, are pruned\n"
        f"(sizes from {shape.source})\n"
        f"{weights} weights{f', {compute} compute' if compute else ''}, {form}, {config.update} weights updated; "
        f"{config.per_device_train_batch_size} x {config.seq_len} tokens a device and pass"
    )


def bucket_table(buckets: Buckets) -> str:
    """A line for each, and their sum."""
    rows = [(name, gb(size)) for name, size in buckets.items()]
    return aligned([*rows, ("in all, GB", gb(sum(buckets.values())))], rule_before_last=True)


def device_table(shape: Shape, config: TrainConfig, found: Traced) -> str:
    """A line for every number of devices that makes sense."""
    header = ("devices", "GB each", "fits", "documents a step", "steps", "GB received a step", "s a step", "run")
    rows = []
    for devices in sensible_devices(config):
        total = sum(on_device(shape, config, found, devices)[1].values())
        rows.append((str(devices), gb(total), smallest_card(total), *cost_cells(cost(shape, config, devices))))
    return aligned([header, *rows])


def cost_cells(found: Cost) -> tuple[str, ...]:
    """Documents and steps, GB over the network, seconds a step, time of a run."""
    network = gb(found.network) if found.network else "-"
    return f"{found.documents}", f"{found.steps:,}", network, f"{found.seconds:.3g}", duration(found.run_seconds)


def remedies_for(shape: Shape, config: TrainConfig, card: int) -> str:
    """What makes the run fit one such card: the least harmful flags that do; if none do, how many cards all take."""

    def fits(remedies: list[Remedy]) -> bool:
        return one_device(shape, remedied(config, remedies)) <= card * GB

    config = replace(config, moment_dtype=moment_dtype_of(config))
    needed: list[Remedy] = []
    for remedy in REMEDIES:
        if fits(needed):
            break
        needed.append(remedy)
    if not needed:
        return f"One {card} GB device: it fits as it is."
    if enough := fits(needed):
        for remedy in needed[:-1]:
            without = [other for other in needed if other is not remedy]
            needed = without if fits(without) else needed
    lines = []
    for number, remedy in enumerate(needed):
        before, after = remedied(config, needed[:number]), remedied(config, needed[: number + 1])
        new = {name: value for name, value in remedy.settings.items() if getattr(before, name) != value}
        if new:
            named = " ".join(f"--{name} {str(value).lower()}" for name, value in new.items())
            lines.append((named, gb(one_device(shape, after)), remedy.price))
    all_of_it = remedied(config, needed)
    verdict = "it fits with these" if enough else f"not even with these, {fewest(shape, all_of_it, card)}"
    return f"One {card} GB device: {verdict}; GB after each\n{aligned(lines, left=(0, 2))}"


def remedied(config: TrainConfig, remedies: list[Remedy]) -> TrainConfig:
    """The config with all their settings."""
    return replace(config, **{name: value for remedy in remedies for name, value in remedy.settings.items()})


def one_device(shape: Shape, config: TrainConfig) -> int:
    """Bytes of one device at its peak."""
    return sum(on_device(shape, config, traced(shape, config), 1)[1].values())


def fewest(shape: Shape, config: TrainConfig, card: int) -> str:
    """How many such cards hold the run, a power of two."""
    found = traced(shape, config)
    for devices in DEVICES:
        if sum(on_device(shape, config, found, devices)[1].values()) <= card * GB:
            return f"which then takes {devices} of them"
    return f"nor {devices} of them"


def smallest_card(total: int) -> str:
    """The smallest of CARDS that holds so many bytes."""
    return next((f"{card} GB" for card in CARDS if total <= card * GB), "none")


def aligned(rows: list[tuple[str, ...]], rule_before_last: bool = False, left: tuple[int, ...] = (0,)) -> str:
    """Columns two blanks apart, indented; those in `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if rule_before_last:
        lines.insert(-1, "-" * max(map(len, lines)))
    return "\n".join(f"  {line}" for line in lines)


def gb(size: float) -> str:
    """Bytes in GB, with two digits after the point."""
    return f"{size / GB:,.2f}"


def count(weights: int) -> str:
    """1234567890 -> 1.23 billion."""
    return f"{weights / 1e9:.2f} billion" if weights >= 1e9 else f"{weights / 1e6:.0f} million"


def duration(seconds: float) -> str:
    """In the unit that a person would take."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
