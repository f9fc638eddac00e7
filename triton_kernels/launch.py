"""How a kernel is launched: the choice of its parameters, and the number of programs that run at once."""

import functools

import torch

from .formats import INTERPRETED, PTX

LANES = 32 if torch.version.hip is None else 64  # of a warp
# 16 warps run at once on a multiprocessor whose threads take 128 registers each. With a scale and in float64 that many
# would spill: they take what they need, up to 168 as a rule, of which 12 warps run at once.
REGISTERS, WARPS, WARPS_OF_MANY_REGISTERS = 128, 16, 12
PROGRAMS_IN_INTERPRETER = 2


def with_given(launch: dict[str, int], given: dict[str, int | None], legal: tuple[dict[str, int], ...]) -> dict:
    """`launch` with the parameters that are `given` (not None); raises ValueError if that is not one of `legal`."""
    new = launch | {name: value for name, value in given.items() if value is not None}
    if new != launch and new not in legal and not INTERPRETED:
        raise ValueError(f"launch parameters {new}: choose one of {', '.join(map(str, legal))}")
    return new


def few_registers(weight: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Whether the prox of this weight fits into REGISTERS."""
    return scale is None and weight.dtype != torch.float64


def programs_for(weight: torch.Tensor, scale: torch.Tensor | None, pieces: int, warps: int) -> int:
    """How many programs of `warps` warps share the pieces of a weight: as many as run at once, at most one a piece."""
    if weight.device.type != "cuda":
        return min(pieces, PROGRAMS_IN_INTERPRETER)
    resident = WARPS if few_registers(weight, scale) else WARPS_OF_MANY_REGISTERS
    return min(pieces, multiprocessors(weight.device) * resident // warps)


def compiler_options(weight: torch.Tensor, scale: torch.Tensor | None) -> dict[str, int]:
    """Triton's options beside num_warps: left alone, its compiler takes up to 167 registers."""
    return {"maxnreg": REGISTERS} if PTX and few_registers(weight, scale) else {}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
