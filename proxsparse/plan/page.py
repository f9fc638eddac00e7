"""The page that --plan prints: memory of one device, memory and time of N devices, flags that save memory."""

from proxsparse.io.text_table import text_table
from proxsparse.plan.cost import DEVICES, cost
from proxsparse.plan.memory import Buckets, Plan
from proxsparse.run.config import TrainConfig

CARDS = (24, 48, 80, 141)  # GB of a GPU's memory
GB = 10**9
HEADER = ("devices", "GB each", "fits", "documents/step", "steps", "GB received/step", "s/step", "run")
REMEDIES = (  # (flags that save memory, what they change), the least harmful first
    ({"gradient_checkpointing": True}, "same result; computes the forward pass of the decoder blocks twice"),
    ({"pretrained_weights": "cpu"}, "same result; with --objective masked every step copies W0 from the host"),
    ({"moment_dtype": "bf16"}, "AdamW's moments are rounded stochastically"),
    ({"precision": "bf16", "master_weights": False}, "weights and gradients are rounded too"),
    (
        {"step_in_backward": True, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
        "no gradient clipping; one optimizer step per forward pass",
    ),
    (
        {"objective": "paper"},
        "no separate copy of the learned weights; worse masks",
    ),
)
NOTES = """\
GB = 10^9 bytes. Memory above a GPU's nominal size (85 GB in an 80 GB H100) is left for fragmentation. Activations
are counted on tensors without data; all other items are computed from formulas. Times are estimates for H200 GPUs (989
TFLOP/s bf16, 4.8 TB/s, NVLink 450 GB/s each way for up to 8 GPUs, 50 GB/s per GPU for more, 64 GB/s to the host) at 40%
of these rates, not measured; see docs/scaling.md. Not included: writing checkpoints."""


def text(config: TrainConfig) -> str:
    """The page. Raises InputError as `Plan` does."""
    plan = Plan(config)
    config = plan.config
    shape, (phase, buckets), host = plan.shape, plan.on_device(1), plan.on_host(1)
    weights, compute = (str(dtype).removeprefix("torch.") for dtype in plan.dtypes)
    size = f"{shape.weights / 1e9:.2f} billion" if shape.weights >= 1e9 else f"{shape.weights / 1e6:.0f} million"
    rows = [device_row(plan, n) for n in DEVICES if n == 1 or cost(plan, n).documents <= config.num_samples]
    sections = [
        f"{config.model}: {size} weights in {shape.blocks} decoder blocks; {shape.layers} layers, "
        f"{shape.prunable / shape.weights:.0%} of the weights, are pruned\n(sizes from {shape.source})\n"
        f"{weights} weights{f', {compute} compute' * (compute != 'None')}, {config.forward} forward pass, updates "
        f"{config.update} weights, {config.per_device_train_batch_size} x {config.seq_len} tokens per device and pass",
        f"Peak memory of one device: {phase}\n{bucket_table(buckets)}",
        f"Host memory per device\n{bucket_table(host)}",
        f"Total on a CPU: {gb(sum(buckets.values()) + sum(host.values()))} GB" * (not plan.on_gpu),
        f"On several devices\n{text_table(HEADER, rows, indent='  ')}",
        f"Flags that save memory, each added to those above: GB on one device, GPUs that fit the run\n{remedies(plan)}",
        NOTES,
    ]
    return "\n\n".join(filter(None, sections))


def device_row(plan: Plan, devices: int) -> tuple[str, ...]:
    """The cells below HEADER for N devices."""
    size, found = plan.device_bytes(devices), cost(plan, devices)
    fits = next((f"{card} GB" for card in CARDS if size <= card * GB), "none")
    run = found.steps * found.seconds
    time = next(
        (f"{run / unit:.1f} {name}" for unit, name in ((3600, "h"), (60, "min")) if run >= unit), f"{run:.0f} s"
    )
    numbers = f"{found.documents}", f"{found.steps:,}", gb(found.network), f"{found.seconds:.3g}"
    return str(devices), gb(size), fits, *numbers, time


def remedies(plan: Plan) -> str:
    """One line per remedy: its flags, the memory and cards with these flags and all above, what they change."""
    rows = [("as given", gb(plan.device_bytes(1)), cards(plan), "")]
    plan = plan.with_flags(moment_dtype=plan.moment_dtype)  # otherwise it would change together with --precision
    for settings, change in REMEDIES:
        flags = {name: value for name, value in settings.items() if getattr(plan.config, name) != value}
        if flags:
            plan = plan.with_flags(**flags)
            named = " ".join(f"--{name} {value}".lower() for name, value in flags.items())
            rows.append((named, gb(plan.device_bytes(1)), cards(plan), change))
    return text_table(None, rows, indent="  ")


def cards(plan: Plan) -> str:
    """The smallest card that the run fits on, else the number of the largest cards."""
    options = [(1, card) for card in CARDS] + [(n, CARDS[-1]) for n in DEVICES[1:]]
    found = next(((n, card) for n, card in options if plan.device_bytes(n) <= card * GB), None)
    return f"{found[0]} x {found[1]} GB" if found else "none"


def bucket_table(buckets: Buckets) -> str:
    """One line per bucket, and their sum."""
    rows = [(name, gb(size)) for name, size in [*buckets.items(), ("total GB", sum(buckets.values()))]]
    return text_table(None, rows, indent="  ")


def gb(size: float) -> str:
    """Bytes in GB, with two decimals."""
    return f"{size / GB:,.2f}"
