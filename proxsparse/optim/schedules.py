"""Schedules of reg_lambda: functions step -> factor, the step counted from 0. Any other callable serves as well.

They are partial functions of this module, so an optimizer that holds one can be pickled.
"""

import math
from collections.abc import Callable
from functools import partial

Schedule = Callable[[int], float]


def linear_ramp(steps: int) -> Schedule:
    """min(1, step / steps): from 0 at the first step to 1 after `steps` steps.

    Raises:
        ValueError: unless steps >= 1.
    """
    return partial(_linear, steps=_checked(steps))


def cosine_ramp(steps: int) -> Schedule:
    """(1 - cos(pi * min(1, step / steps))) / 2: as `linear_ramp`, with a smooth start and end."""
    return partial(_cosine, steps=_checked(steps))


def _checked(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"steps={steps!r}: a ramp needs at least 1 step; leave the schedule out for a constant lambda")
    return steps


def _linear(step: int, steps: int) -> float:
    return min(1.0, step / steps)


def _cosine(step: int, steps: int) -> float:
    return (1 - math.cos(math.pi * _linear(step, steps))) / 2
