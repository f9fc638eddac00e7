"""`python -m proxsparse.env`: what this machine offers, and which backend serves which op, or why not."""

import argparse
import contextlib
import platform
import sys

import torch

import proxsparse
from proxsparse.device import choose_device, device_name, version
from proxsparse.errors import run_command
from proxsparse.ops.registry import BACKENDS, chosen_backend, kernels, ops, select

PACKAGES = ("torch", "triton", "transformers", "datasets", "safetensors", "gguf", "matplotlib", "lm-eval")
# Arguments after the tensor with which each op asks its kernels whether they support it.
TYPICAL_ARGUMENTS = {
    "prox_nm_": (0.1, 2, 4, None),
    "prox_nm_list_": (2, 4),
    "adamw_prox_": (None,) * 6 + (1, 1e-3, 0.9, 0.999, 1e-8, 0.0, 0.1, 2, 4, 0.0, 0.1, None),
    "nm_mask": (2, 4),
    "pack_nm": (2, 4),
    "unpack_nm": (None, 2, 4),
}


def main(arguments: list[str] | None = None) -> int:
    """Prints versions, the table op x backend, and the reason for every cell that is empty."""
    parser = argparse.ArgumentParser(prog="python -m proxsparse.env", description=__doc__.partition(": ")[2])
    parser.parse_args(arguments)
    device = choose_device("auto")
    print(f"proxsparse {proxsparse.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"device {device_name(device)}, {torch.get_num_threads()} threads")
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    print(f"\nbackends of a bfloat16 2:4 weight on {device}, chosen explicitly: {chosen_backend() or 'none'}")
    print(backend_table(torch.zeros(4, 8, dtype=torch.bfloat16, device=device)))
    return 0


def backend_table(tensor: torch.Tensor) -> str:
    """One row an op, one column a backend ("serves" a call like this one, "ready" behind it, "-"), and why not."""
    width = max(map(len, ops())) + 2
    lines, reasons = [" " * width + "".join(f"{backend:<12}" for backend in BACKENDS)], []
    for op in ops():
        answers = {kernel.backend: kernel.supports(tensor, *TYPICAL_ARGUMENTS[op]) for kernel in kernels(op)}
        answers = {backend: answers.get(backend, "it has no kernel for this op") for backend in BACKENDS}
        words = {backend: "ready" for backend, reason in answers.items() if reason is None}
        with contextlib.suppress(RuntimeError):  # an explicit choice that cannot serve this op
            words[select(op, tensor, *TYPICAL_ARGUMENTS[op]).backend] = "serves"
        lines.append(f"{op:<{width}}" + "".join(f"{words.get(backend, '-'):<12}" for backend in BACKENDS))
        reasons += [f"  {op} on {backend}: {reason}" for backend, reason in answers.items() if reason is not None]
    return "\n".join([*lines, "", "why not:", *reasons])


if __name__ == "__main__":
    sys.exit(run_command(main))
