"""The search for the grid of values that were rounded to 4 bits before, such as those of a GGUF file.

GGUF's Q4_0 and Q4_1 store every 32 columns of a weight as codes q from 0 to 15 and float16 numbers d and m, w = d q + m
(Q4_0: m = -8 d). Pruning does not change the kept weights: they still have codes, and need no rounding.
`reference.quantize` describes how these are stored.
"""

import torch
from torch import Tensor

from proxsparse.reference.quantize import GRID_GROUP, LARGEST_OF_GRID, grid_scales, pack_codes

TOGETHER = 1 << 13  # groups that are searched together, so that their values stay in the cache
TOLERANCE = 2.0**-21  # of |w - min(w) - q d| / max |w| in a group; larger errors exclude it before the exact comparison
Grid = tuple[Tensor, Tensor, Tensor]  # codes [n, 16], d [n, 1], m [n, 1], in float32


def find_grid(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """values [..., k] -> codes uint8 [..., k / 2] and scales int32 [..., ceil(k / 16)] without loss; else None.

    A grid of a group is found whenever the sums d q + m are exact in float32, as all below 1 are. Every value must be
    reproduced in its dtype; a -0.0 becomes +0.0, because Q4_0 has -0.0 where d is negative, and d q + m has not.

    Args:
        values: of a packed 2:4 weight, floating point.
    Returns:
        None if a group has no grid; the groups after it are not searched.
    """
    k = values.shape[-1]
    if k % 2 or not values.numel():
        return None
    groups = -(-k // GRID_GROUP)
    places = torch.arange(groups * GRID_GROUP, device=values.device).clamp(max=k - 1)  # repeats the last value
    codes, scales = [], []
    for rows in values.reshape(-1, k).split(max(TOGETHER // groups, 1)):
        grid = grid_of_groups(rows[:, places].view(-1, GRID_GROUP))
        if grid is None:
            return None
        codes.append(pack_codes(grid[0].view(len(rows), -1)[:, :k]))
        scales.append(grid_scales(grid[1], grid[2]).view(len(rows), -1))
    return torch.cat(codes).view(*values.shape[:-1], -1), torch.cat(scales).view(*values.shape[:-1], -1)


def grid_of_groups(values: Tensor) -> Grid | None:
    """values [n, 16] -> their grids; None if a group has none."""
    if not (values.float() == values).all():  # float64 with more digits, or NaN
        return None
    codes, d = torch.zeros_like(values, dtype=torch.float32), values.new_zeros(len(values), 1, dtype=torch.float32)
    grids, left = (codes, d, d.clone()), torch.arange(len(values), device=values.device)
    for span in range(LARGEST_OF_GRID, -1, -1):
        found, fits = grid_with_span(values[left], span)
        for tensor, part in zip(grids, found, strict=True):
            tensor[left[fits]] = part[fits]
        left = left[~fits]
        if not len(left):
            return grids
    return None


def grid_with_span(values: Tensor, span: int) -> tuple[Grid, Tensor]:
    """The grids of values [n, 16] whose codes have the largest difference `span`, and for which groups they fit.

    d = (max - min) / span. If the values are multiples of d from the smallest one on, m is tried at 0 to 15 - span
    steps below the smallest value, and above the largest one for a negative d, as Q4_0 may have.
    """
    exact = values.float()
    low, high = exact.aminmax(dim=-1, keepdim=True)
    fits = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    if span == 0:  # one value: the code is 0, or it is 1 and d is what m lacks, exact for magnitudes below a half
        m, is_one_value = float16(low), (low == high)[:, 0]
        d = float16(low - m)
        grid = (d != 0).float().expand_as(exact), d, m
        return grid, is_one_value & reproduces(grid, values)
    d = float16((high - low) / span)
    steps = ((exact - low) / d).round_()
    error = (exact - low).addcmul_(steps, d, value=-1).abs_().amax(-1)
    near = (error <= TOLERANCE * torch.maximum(-low, high)[:, 0]) & (steps.amax(-1) == span)
    here, m = near.nonzero()[:, 0], torch.zeros_like(d)
    for first in range(LARGEST_OF_GRID - span + 1):
        for sign in (1, -1):
            codes = first + (steps[here] if sign == 1 else span - steps[here])
            grid = codes, sign * d[here], float16((low if sign == 1 else high)[here] - sign * first * d[here])
            found = reproduces(grid, values[here])
            for tensor, part in zip((steps, d, m), grid, strict=True):
                tensor[here[found]] = part[found]
            fits[here[found]] = True
            here = here[~found]
    return (steps, d, m), fits


def reproduces(grid: Grid, values: Tensor) -> Tensor:
    """For which groups d q + m, rounded to the dtype of the values, is every value."""
    codes, d, m = grid
    return ((codes * d + m).to(values.dtype) == values).all(-1)


def float16(numbers: Tensor) -> Tensor:
    """The nearest float16, in float32."""
    return numbers.half().float()
