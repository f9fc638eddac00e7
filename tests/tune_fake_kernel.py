"""A worker of benchmarks/tune.py with kernels that sleep, err, crash or hang: test_tune.py starts it as a process."""

import contextlib
import os
import sys
import time
from dataclasses import replace

import torch
import tune
from tune_kernels import Case, Kernel, Trial

from proxsparse.ops import tuning

# parameter "kind" -> milliseconds of a run; {} are the defaults
SLEEPS = {None: 20, "fast": 5, "faster": 2, "slow": 40, "wrong": 1, "raises": 1, "crashes": 1, "hangs": 1}


def trial(case: Case, device: torch.device) -> Trial:
    """Does what the parameters in force ask for."""
    kind = tuning.launch_parameters("fake", torch.bfloat16, device, case.size).get("kind")
    if kind == "raises":
        raise RuntimeError("no such\nlaunch")
    if kind == "crashes":
        os.abort()
    if kind == "hangs":
        time.sleep(1000)
    problem = "off by one" if kind == "wrong" else None
    return Trial(lambda: problem, lambda: time.sleep(SLEEPS[kind] / 1000), lambda: None, 1, 1000, 1000)


def force(parameters: dict) -> contextlib.AbstractContextManager:
    return tuning.use_launch_parameters("fake", **parameters)


KINDS = os.environ.get("FAKE_KINDS", "fast").split()
FAKE = Kernel(
    cases=lambda device: [Case((8, 4, 1)), Case((8, 4, 16))],
    parameters=lambda device: [{"kind": kind} for kind in KINDS],
    trial=trial,
    force=force,
    in_triton=True,  # so that it runs on a CPU
)
KERNELS = {"gemv": FAKE, "prox": replace(FAKE, cases=lambda device: [Case((32,))])}

if __name__ == "__main__":
    if "--compile" in sys.argv and os.environ.get("FAKE_COMPILER"):
        os.abort()
    tune.KERNELS.update(KERNELS)
    sys.exit(tune.main(sys.argv[1:]))
