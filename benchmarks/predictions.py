"""Predictions for an H100 and an H200, made before anything was measured there, and written into the measured rows.

A prediction is arithmetic: bytes over the speed of copying (H100 3.0 TB/s, H200 4.3 TB/s, reads and writes counted),
instructions from the machine code over 4 a clock and multiprocessor (132 at 1.755 GHz: 927 billion a second), and
launches. `append_rows` (common.py) adds `predicted_share` and `predicted_times_dense` to the rows of a benchmark.

To add one, append a Prediction: its `case` names fields of the benchmark's rows, and all of them have to match.
"""

from dataclasses import dataclass

SHARE, TIMES_DENSE = "predicted_share", "predicted_times_dense"


@dataclass(frozen=True)
class Prediction:
    """A prediction for the rows of a benchmark whose fields are those of `case`.

    Args:
        case: field -> value; a range stands for every number in it, a tuple for every value in it.
        field: SHARE, of the speed of copying, or TIMES_DENSE, the speed against dense in the same mode.
        h100, h200: the value on each, of a range its middle; None: nothing was predicted.
        because: the arithmetic.
    """

    benchmark: str
    case: dict[str, object]
    field: str
    h100: float | None
    h200: float | None
    because: str


def gemv(
    weights: str | tuple[str, ...], rows: object, field: str, h100: float | None, h200: float | None, because: str
):
    """A prediction for rows of linear_speed, in bfloat16."""
    case = {"backend": "gemv", "weights": weights, "rows": rows, "dtype": "bfloat16"}
    return Prediction("linear_speed", case, field, h100, h200, because)


def prox(kernel: str, dtype: str, reg_lambda: float, h100: float, h200: float, because: str) -> Prediction:
    """A prediction for rows of prox_speed: weights with standard deviation 0.02."""
    case = {"kernel": kernel, "dtype": dtype, "lambda": reg_lambda}
    return Prediction("prox_speed", case, SHARE, h100, h200, because)


def step(optimizer: str, h100: float, h200: float, because: str) -> Prediction:
    """A prediction for rows of optimizer_step, in bfloat16."""
    return Prediction("optimizer_step", {"optimizer": optimizer, "dtype": "bfloat16"}, SHARE, h100, h200, because)


WIDE, SQUARE, NARROW = "14336x4096", "4096x4096", "1024x4096"
# Of commit c0c78ba. Kernels that have changed since have further entries after these: where two entries fit a row, the
# later one counts.
PREDICTIONS = [
    gemv(WIDE, 1, SHARE, 0.875, 0.835, "66 MB; 147 KB of loads in flight on a multiprocessor, 18 to 25 needed; 25 us"),
    gemv(WIDE, 1, TIMES_DENSE, 1.65, 1.6, "9/16 of the bytes; dense reaches 92% of its limit"),
    gemv(SQUARE, 1, SHARE, 0.675, 0.585, "18.9 MB take 6.3 us, start, first latency and sums 3 us more; 9.3 us"),
    gemv(SQUARE, 1, TIMES_DENSE, 1.45, 1.4, "9/16 of the bytes; a fixed 3 us in both"),
    gemv(NARROW, 1, SHARE, 0.30, 0.25, "4.7 MB take 1.6 us; the fixed cost and two barriers of a cluster 4 us"),
    gemv(NARROW, 1, TIMES_DENSE, 1.08, None, "both are all start and latency"),
    gemv((WIDE, SQUARE), range(9, 17), SHARE, 0.625, 0.525, "131 KB of x a block, staged serially; 74 KB of weights"),
    prox("triton", "bfloat16", 0.25, 0.885, 0.80, "4 B a weight, 79 instructions a block; 17 warps, no prefetch"),
    prox("triton", "bfloat16", 1.0, 0.84, 0.74, "4 B a weight, 95 instructions a block"),
    prox("triton", "bfloat16", 25.0, 0.30, 0.22, "406 instructions a block: the issue of instructions binds"),
    prox("cuda", "bfloat16", 25.0, 0.38, 0.27, "310 instructions a block: the issue of instructions binds"),
    prox("triton", "float32", 0.25, 0.92, 0.90, "8 B a weight: half the instructions of bfloat16 a byte"),
    step("ProxAdamW", 0.885, 0.84, "22 B a weight; 670 instructions for 256 weights: 39% of the issue, on an H200 55%"),
    step(
        "ProxAdamW, the same, bf16 moments", 0.82, 0.72,
        "14 B a weight; 896 instructions for 256 weights: 81% of the issue on an H100, 116% on an H200",
    ),
    Prediction(
        "linear_speed",
        {"backend": "cutlass", "rows": range(2048, 1 << 20), "dtype": "bfloat16"},
        TIMES_DENSE, 1.28, 1.28, "twice the operations of dense at most; power and shared memory bind",
    ),
    Prediction(
        "linear_speed",
        {"backend": "cutlass", "rows": range(17, 129), "dtype": "bfloat16"},
        TIMES_DENSE, 1.0, 1.0, "64 thread blocks for 4096 rows of W; the metadata is two kernels more",
    ),
    Prediction(
        "generate_speed",
        {"model": ("mistral-7b-v0.1", "llama-3.1-8b"), "batch": 1, "mode": "graph", "form": "sparse"},
        TIMES_DENSE, 1.29, None,
        "4.9 + 0.35 + 2.7 = 7.9 ms dense, 2.9 + 0.5 + 2.7 = 6.1 ms sparse: layers, head, 42 small kernels a block",
    ),
    # After the changes of 2026-11-22: gemv shares x between warps, persistent Triton prox, one load phase in the fused
    # step, metadata of CUTLASS held, merged projections, compiled glue. Expected, as all above, not measured.
    gemv(WIDE, range(9, 17), SHARE, 0.82, 0.77, "66 MB; x from L2 29 MB instead of 117; 55 KB in flight of 16 needed"),
    gemv(WIDE, range(5, 9), SHARE, 0.82, 0.77, "66 MB; 55 KB of loads in flight on a multiprocessor, 16 to 23 needed"),
    gemv(WIDE, range(9, 17), TIMES_DENSE, 1.7, 1.6, "26.7 us on an H100, 20 us on an H200; 9/16 of the bytes"),
    gemv(SQUARE, range(9, 17), SHARE, 0.66, 0.55, "18.9 MB take 6.3 us on an H100, fixed cost 2.8 us more"),
    gemv(SQUARE, range(9, 17), TIMES_DENSE, 1.5, None, "9.6 us; a fixed 2.8 us in both"),
    prox("triton", "bfloat16", 0.25, 0.935, 0.905, "87 instructions a block: 55% of the issue, on an H200 79%"),
    prox("triton", "bfloat16", 1.0, 0.915, 0.80, "120 instructions a block: 76% of the issue, an H200 is bound"),
    prox("triton", "bfloat16", 25.0, 0.31, 0.225, "406 instructions a block: the issue of instructions binds"),
    prox("triton", "float32", 0.25, 0.935, 0.935, "16 warps of 2 KB in flight; half the instructions a byte"),
    Prediction(
        "linear_speed",
        {"backend": "cutlass:prepared", "rows": range(17, 129), "weights": SQUARE, "dtype": "bfloat16"},
        TIMES_DENSE, 1.2, 1.2, "one launch and 4.2 MB less, about 3 us of 12 to 15",
    ),
    *(
        Prediction(
            "generate_speed",
            {"model": "mistral-7b-v0.1", "batch": 1, "mode": mode, "form": form},
            TIMES_DENSE, h100, h200, because,
        )
        for mode, form, h100, h200, because in (
            ("graph", "sparse", 1.31, 1.22, "7.74 / 5.89 ms, on an H200 6.26 / 5.14 ms: 38 small kernels a block"),
            ("graph", "sparse+merged", 1.34, 1.24, "7.59 / 5.68 ms, 6.11 / 4.93 ms: 4 products a block instead of 7"),
            ("compiled_glue", "sparse", 1.44, 1.32, "6.09 / 4.24 ms, 4.61 / 3.49 ms: 12 small kernels a block"),
            ("compiled_glue", "sparse+merged", 1.47, 1.36, "5.94 / 4.03 ms, 4.46 / 3.28 ms: both"),
            ("dependent", "sparse+merged", 1.55, 1.45, "1 to 2 us less for each of 128 products: 0.13 to 0.26 ms"),
        )
    ),
]  # fmt: skip


def predicted(benchmark: str, field: str = SHARE, **case: object) -> float | None:
    """The prediction for a row of the benchmark with these fields, `device` among them; None if there is none."""
    kind = next((kind for kind in ("h100", "h200") if kind in str(case.get("device", "")).lower()), None)
    fitting = [known for known in PREDICTIONS if (known.benchmark, known.field) == (benchmark, field)]
    values = [getattr(known, kind) for known in fitting if kind and fits(known.case, case)]
    return values[-1] if values else None


def fits(wanted: dict[str, object], row: dict[str, object]) -> bool:
    """Whether the row has every field of `wanted`, with its value or one of its values."""
    for name, value in wanted.items():
        values = value if isinstance(value, range | tuple) else (value,)
        if name not in row or row[name] not in values:
            return False
    return True


def predictions_for(benchmark: str, row: dict[str, object]) -> dict[str, float]:
    """predicted_share and predicted_times_dense of a row, as far as there are such predictions."""
    found = {field: predicted(benchmark, field, **row) for field in (SHARE, TIMES_DENSE)}
    return {field: value for field, value in found.items() if value is not None}
