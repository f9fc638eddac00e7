"""The op `proxsparse::adamw_prox_`: an AdamW step, then the prox, in one pass and in place."""

from collections import namedtuple

import torch
from torch import Tensor

from proxsparse import reference
from proxsparse.ops.prox import check_reg_lambda, in_range, whole_rows, write_back
from proxsparse.ops.registry import define_op, register_kernel, select
from proxsparse.patterns import FLOAT_DTYPES, NMPattern, PatternLike, check_dtype


@define_op(
    "adamw_prox_",
    "(Tensor(a!) weight, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? master, "
    "Tensor? scale, int step, float lr, float beta1, float beta2, float eps, float weight_decay, float reg_lambda, "
    "int n, int m, int? seed) -> ()",
)
def _adamw_prox_(weight, grad, exp_avg, exp_avg_sq, master, scale, *settings) -> None:
    if weight.numel() == 0:
        return
    if scale is not None:
        scale = scale.to(arithmetic_of(weight))
    tensors = (weight, grad, exp_avg, exp_avg_sq, master, scale)
    *_, reg_lambda, _n, m, _seed = settings
    m = m if reg_lambda > 0 else 1
    dense = {id(x): whole_rows(x, m, 1.0 if x is scale else 0.0) for x in tensors if x is not None}
    arguments = [dense.get(id(tensor)) for tensor in tensors]
    kernel = select("adamw_prox_", *arguments, *settings)
    kernel.run(*arguments, *settings)
    for tensor in (weight, exp_avg, exp_avg_sq, master):
        if tensor is not None:
            write_back(tensor, dense[id(tensor)])


# Of the op, by the names in its schema.
Arguments = namedtuple(
    "Arguments", [argument.name for argument in torch.ops.proxsparse.adamw_prox_.default._schema.arguments]
)


@register_kernel("adamw_prox_", "reference")
def _reference(weight, grad, exp_avg, exp_avg_sq, master, scale, *settings) -> None:
    *head, n, m, seed = settings  # head: step to reg_lambda
    pattern = NMPattern(n, m) if head[-1] > 0 else None
    results = reference.adamw_prox(weight, grad, exp_avg, exp_avg_sq, master, scale, *head, pattern, seed)
    for tensor, result in zip((weight, exp_avg, exp_avg_sq, master), results, strict=True):
        if tensor is not None:
            tensor.copy_(result)


def pattern_of(arguments: tuple) -> tuple[int, int]:
    """(n, m) for a kernel, from the last arguments of the op; 2:4, which all support, for AdamW without the prox."""
    *_, reg_lambda, n, m, _seed = arguments
    return (n, m) if reg_lambda > 0 else (2, 4)


def arithmetic_of(weight: Tensor) -> torch.dtype:
    """The dtype a kernel computes in: float64 for a float64 weight, float32 otherwise."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def check_tensor(tensor: Tensor, what: str, shape: torch.Size, dtypes: tuple[torch.dtype, ...], weight: Tensor) -> None:
    """Raises ValueError unless the tensor has the shape, one of the dtypes, and the device of the weight."""
    if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != weight.device:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{what} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; for a {weight.dtype} weight of shape "
            f"{list(weight.shape)} it must be {names} {list(shape)} on {weight.device}; convert it, or "
            "create the optimizer after the model is converted"
        )


def check_numbers(step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raises ValueError for settings of AdamW that are out of range."""
    if step < 1:
        raise ValueError(f"step={step}: steps are counted from 1")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not in_range(value, 0):
            raise ValueError(f"{name}={value!r} must be a finite number >= 0")
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(in_range(beta, 0, 1) for beta in betas):
        raise ValueError(f"betas={betas!r} must be two numbers in [0, 1)")


@torch.no_grad()
def adamw_prox_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    reg_lambda: float = 0.0,
    pattern: PatternLike = "2:4",
    seed: int | None = None,
) -> Tensor:
    """W <- prox_{lambda_1 Reg_{N:M}}(AdamW step of W), in one pass over weight, gradient and moments, in place.

    The equations are in `reference.adamw_prox`: with `scale` = c, the AdamW step acts on v = c * w (learning rate lr /
    c in each column); then comes the exact prox. The prox does not change blocks with NaN or infinity; zeros are +0.0.
    Arithmetic is fp64 for a float64 weight and fp32 otherwise; only stored values are rounded.

    Args:
        weight: [..., in_features], float32, float64, bfloat16 or float16; any shape if reg_lambda is 0. Changed in
            place. All tensors may have any strides.
        grad: shape and dtype of the weight, or bfloat16 for a float32 weight; not changed.
        exp_avg, exp_avg_sq: the moments of v, float32 or bfloat16 (float64 for a float64 weight). Changed in place.
        master: float32 copy of a bfloat16 or float16 weight: the step updates it, and the weight becomes its rounded
            value. Changed in place. None: the step updates the weight itself.
        scale: c, [in_features], the scaling of the input features, positive; None means 1.
        step: t, counted from 1.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        reg_lambda: lambda_1 >= 0, in units of 1 / |c * w|^(N-1). Not multiplied by lr. 0: AdamW alone.
        pattern: "N:M" or an NMPattern; N of every M weights are kept.
        seed: an integer, taken modulo 2^64, for stochastic rounding to bfloat16 of the moments and, without a
            master, of the weight. The same seed gives the same bits on every backend. Use random-looking numbers:
            seeds that differ only in their lower 32 bits give the same bits in another order. None: round to nearest
            even.
    Returns:
        `weight`.
    Raises:
        ValueError: `NMPattern.check_blocks` refuses in_features; a tensor does not fit the weight; a number is out of
            range.
        RuntimeError: the Triton backend in the capture of a CUDA graph: replays would repeat this step.
    """
    tensors = (weight, grad, exp_avg, exp_avg_sq, master, scale)
    numbers = (step, lr, betas, eps, weight_decay, reg_lambda, pattern, seed)
    torch.ops.proxsparse.adamw_prox_(*checked(*tensors, *numbers))
    return weight


def checked(
    weight, grad, exp_avg, exp_avg_sq, master, scale, step, lr, betas, eps, weight_decay, reg_lambda, pattern, seed
) -> Arguments:
    """The arguments of the op for those of `adamw_prox_`. Raises its errors."""
    check_dtype(weight, "weight")
    arithmetic = arithmetic_of(weight)
    dtypes = (weight.dtype, torch.bfloat16) if weight.dtype == torch.float32 else (weight.dtype,)
    check_tensor(grad, "grad", weight.shape, dtypes, weight)
    short = (torch.bfloat16,) if arithmetic == torch.float32 else ()
    check_tensor(exp_avg, "exp_avg", weight.shape, (arithmetic, *short), weight)
    check_tensor(exp_avg_sq, "exp_avg_sq", weight.shape, (exp_avg.dtype,), weight)
    if master is not None:
        if weight.dtype == arithmetic:
            raise ValueError(f"master: only bfloat16 and float16 weights can have a master, not {weight.dtype}")
        check_tensor(master, "master", weight.shape, (torch.float32,), weight)
    if scale is not None:
        check_tensor(scale, "scale", weight.shape[-1:], FLOAT_DTYPES, weight)
    check_numbers(step, lr, betas, eps, weight_decay)
    check_reg_lambda(reg_lambda)
    pattern = NMPattern.parse(pattern)
    if reg_lambda > 0:
        pattern.check_blocks(weight.shape)
    if seed is not None:
        seed = (seed + 2**63) % 2**64 - 2**63  # modulo 2^64 as two's complement: the dispatcher's integers are signed
    tensors = (weight, grad, exp_avg, exp_avg_sq, master, scale)
    return Arguments(*tensors, step, lr, *betas, eps, weight_decay, reg_lambda, pattern.n, pattern.m, seed)
