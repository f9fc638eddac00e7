"""Every op on every backend of a device against float64: fresh random inputs, guards, odd and huge sizes.

    python3 benchmarks/gpu_checks.py --jobs 8           # the GPU
    python3 benchmarks/gpu_checks.py --small --jobs 16  # a smoke test of every op and backend
    python3 benchmarks/gpu_checks.py --small --no_judge --backends cuda triton      # for compute-sanitizer
    python3 benchmarks/gpu_checks.py --device cpu --small

The checks of packed layers come first. Exits with 1 if a check failed, or none passed. The seed is printed; --seed
repeats the same inputs.
"""

import argparse
import os
import random
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import checks_adamw  # noqa: F401  registers its checks
import checks_linear  # noqa: F401
import checks_prox  # noqa: F401
import torch
from checking import CHECKS, Check, Place, Skipped

from proxsparse.runtime.device import choose_device

# The order in which ops are checked, the most important first.
OPS = ("sparse_linear", "prox_nm_", "adamw_prox_", "pack_nm", "prox_nm_list_", "nm_mask")
BACKENDS = {"cuda": ("triton", "cuda", "reference"), "cpu": ("cpp", "reference")}  # device -> what is checked there
SMALL_LIMIT_S, LIMIT_S = 50, 200  # of a check in a process of its own
OUTCOMES = ("passed", "failed", "skipped")


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    device = choose_device(args.device)
    backends = args.backends or BACKENDS[device.type]
    print(f"checks on {device}, seed {args.seed}", flush=True)
    pairs = [
        (check, backend)
        for check in sorted(CHECKS, key=lambda check: OPS.index(check.op))
        for backend in backends
        if args.only in (None, check.name) and check.concerns(backend)
    ]
    together = [pair for pair in pairs if args.jobs > 1 and not pair[0].alone]
    with ThreadPoolExecutor(args.jobs) as pool:
        words = [word for found in pool.map(lambda pair: in_a_process(*pair, args), together) for word in found]
    # torch.empty is filled with NaN then, so that unwritten memory shows
    torch.use_deterministic_algorithms(True, warn_only=True)
    words += [
        outcome(check, Place(device, backend, args.small, args.judge), args.seed)
        for check, backend in pairs
        if (check, backend) not in together
    ]
    print(", ".join(f"{words.count(word)} {word}" for word in OUTCOMES))
    return 1 if "failed" in words or "passed" not in words else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--backends", nargs="+", help="default: all of the device")
    parser.add_argument(
        "--only", choices=[check.name for check in CHECKS], metavar="CHECK", help="such as prox_nm_.exact"
    )
    parser.add_argument("--small", action="store_true", help="few and small sizes, two dtypes")
    parser.add_argument(
        "--no_judge",
        dest="judge",
        action="store_false",
        help="run the kernels without comparing with float64, for compute-sanitizer (not initcheck)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes at a time: what takes long is to compile kernels"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of all inputs; default: a fresh one")
    return parser.parse_args(arguments)


def in_a_process(check: Check, backend: str, args: argparse.Namespace) -> list[str]:
    """Runs one check by itself, prints what it printed, and returns its outcome."""
    flags = ["--device", args.device, "--backends", backend, "--only", check.name, "--seed", str(args.seed)]
    flags += ["--small"] * args.small + ["--no_judge"] * (not args.judge)
    command = [sys.executable, __file__, *flags]
    limit = SMALL_LIMIT_S if args.small else LIMIT_S
    # the processes share the cores: with more threads than cores they would wait for each other
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.jobs))}
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        print(f"failed   {check.name} {backend}: stopped after {limit} s", flush=True)
        return ["failed"]
    lines = done.stdout.splitlines()[1:-1]  # without the seed and the count
    words = [line.split()[0] for line in lines if line.startswith(OUTCOMES)]
    if not words:  # it crashed
        words, lines = ["failed"], [f"failed  {check.name} {backend}: exit code {done.returncode}", done.stdout]
    print("\n".join(lines), flush=True)
    return words


def outcome(check: Check, place: Place, seed: int) -> str:
    """Runs one check and prints a line: "passed", "failed" or "skipped", with the reason."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    try:
        word, said = "passed", check.run(place) or ""
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
    except Skipped as error:
        word, said = "skipped", str(error)
    except Exception as error:  # whatever a kernel does, the other checks are wanted
        word, said = "failed", f"{type(error).__name__}: {error}"
        if not isinstance(error, AssertionError):
            traceback.print_exc()
    seconds = time.perf_counter() - start
    print(f"{word:<8} {check.name:<39} {place.backend:<10}{seconds:6.1f} s  {said}", flush=True)
    return word


if __name__ == "__main__":
    sys.exit(main())
