"""`python -m proxsparse.env`: what this machine offers, and which backend serves which op, or why not."""

import argparse
import importlib.metadata
import os
import platform
import sys

import torch

import proxsparse
from proxsparse.errors import run_command
from proxsparse.ops.registry import BACKENDS, chosen_backend, kernels, ops

PACKAGES = ("torch", "triton", "transformers", "datasets", "safetensors", "gguf", "matplotlib", "lm-eval")
# Arguments after the tensor with which each op asks its kernels whether they support it.
TYPICAL_ARGUMENTS = {"prox_nm_": (0.1, 2, 4, None), "nm_mask": (2, 4)}


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m proxsparse.env", description=__doc__.split(": ", 1)[1])
    parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"proxsparse {proxsparse.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"device {device_name()}, {torch.get_num_threads()} threads")
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES), end="\n\n")
    print(
        f"Backends for a bfloat16 2:4 weight on {device}, fastest first (explicit choice: {chosen_backend() or 'none'})"
    )
    reasons = {}
    width = max(map(len, ops())) + 2
    print(" " * width + "".join(f"{backend:<12}" for backend in BACKENDS))
    for op in ops():
        row = {
            kernel.backend: kernel.supports(typical_tensor(device), *TYPICAL_ARGUMENTS[op]) for kernel in kernels(op)
        }
        row |= {backend: "it has no kernel for this op" for backend in BACKENDS if backend not in row}
        serving = next((backend for backend in BACKENDS if row[backend] is None), None)
        cells = ["serves" if b == serving else "ready" if row[b] is None else "-" for b in BACKENDS]
        print(f"{op:<{width}}" + "".join(f"{cell:<12}" for cell in cells))
        reasons |= {(op, backend): reason for backend, reason in row.items() if reason}
    print("\nWhy not:" if reasons else "")
    for (op, backend), reason in reasons.items():
        print(f"  {op} on {backend}: {reason}")
    return 0


def typical_tensor(device: str) -> torch.Tensor:
    """A small weight of the usual dtype."""
    return torch.zeros(4, 8, dtype=torch.bfloat16, device=device)


def version(package: str) -> str:
    """The installed version of a package, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def device_name() -> str:
    """The GPU's name, else the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.cpu.get_capabilities().get('cpu_name', platform.processor())}, {os.cpu_count()} cores"


def environment() -> dict:
    """What a result depends on: versions, device, threads; for result.json and benchmark rows."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": device_name(),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
