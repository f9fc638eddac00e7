"""Schedules of reg_lambda: functions step -> factor, with steps counted from 0. Any other callable works too.

They are partial functions of this module, so an optimizer with a schedule can be pickled.
"""

import math
from collections.abc import Callable
from functools import partial

Schedule = Callable[[int], float]


def linear_ramp(steps: int) -> Schedule:
    """min(1, step / steps): from 0 at the first step to 1 after `steps` steps.

    Raises:
        ValueError: steps < 1.
    """
    return partial(_linear, steps=_checked(steps))


def cosine_ramp(steps: int) -> Schedule:
    """(1 - cos(pi * min(1, step / steps))) / 2: `linear_ramp` with a smooth start and end. Raises as `linear_ramp`."""
    return partial(_cosine, steps=_checked(steps))


def _checked(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"steps={steps!r}: a ramp needs at least 1 step; omit the schedule for a constant lambda")
    return steps


def _linear(step: int, steps: int) -> float:
    return min(1.0, step / steps)


def _cosine(step: int, steps: int) -> float:
    return (1 - math.cos(math.pi * _linear(step, steps))) / 2
