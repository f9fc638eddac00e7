"""`proxsparse env`: versions, the backend of each op on this machine, why others are unavailable, and how to fix it."""

import collections
import contextlib
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import torch

import proxsparse
from proxsparse.errors import run_command
from proxsparse.io.text_table import text_table
from proxsparse.ops.registry import AUTOMATIC, chosen_backend, get_kernel, list_backends, list_ops, select
from proxsparse.ops.sparse_linear import select_kernel
from proxsparse.runtime.command import Parser
from proxsparse.runtime.device import choose_device, device_name, version

PACKAGES = ("torch", "triton", "transformers", "datasets", "safetensors", "gguf", "matplotlib", "lm-eval")
# Typical arguments after the tensor, passed to `supports` of the kernels of each op.
TYPICAL_ARGUMENTS = {
    "prox_nm_": (0.1, 2, 4, None),
    "prox_nm_list_": (2, 4),
    "adamw_prox_": (None,) * 6 + (1, 1e-3, 0.9, 0.999, 1e-8, 0.0, 0.1, 2, 4, 0.0, 0.1, None),
    "nm_mask": (2, 4),
    "masked_weight_": (None, None, None, 2, 4),
    "pack_nm": (2, 4),
    "unpack_nm": (None, 2, 4),
    "quantize_nm": (4,),
    "dequantize_nm": (None, None),
}


def main(arguments: list[str] | None = None) -> int:
    """Prints versions, the backend of each op and of packed layers, and the remedies for unavailable backends."""
    Parser("env", description="Print " + __doc__.partition(": ")[2]).parse_args(arguments)
    device = choose_device("auto")
    ops = op_rows(torch.zeros(4, 8, dtype=torch.bfloat16, device=device))
    packed = packed_rows(device)
    print(f"proxsparse {proxsparse.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"device {device_name(device)}, threads: {torch.get_num_threads()}")
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    print(f"CUDA {torch.version.cuda or 'none'}, ROCm {torch.version.hip or 'none'} (of this build of torch)")
    print(f"compilers: {program_version(os.environ.get('CXX') or 'c++')}; nvcc {program_version('nvcc')}")
    print(f"\nbackends for a bfloat16 2:4 weight on {device}; explicitly selected: {chosen_backend() or 'none'}")
    print(table(ops))
    print(f'\nbackends for a packed bfloat16 layer (SparseLinear) on {device}, backend="auto"')
    print(table(packed))
    print("\nfor a faster backend:")
    print("\n".join(f"  {line}" for line in faster(ops, packed, device) or ["nothing to change here"]))
    return 0


def program_version(program: str) -> str:
    """The line of `program --version` that contains the version; "missing" if the program is not on PATH."""
    path = shutil.which(program)
    if path is None:
        return "missing"
    lines = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    return next((line.strip() for line in lines if re.search(r"\d+\.\d+", line)), path)


def faster(ops: dict[str, tuple], packed: dict[str, tuple], device: torch.device) -> list[str]:
    """The remedies that make a faster backend available, one line each."""
    waiting = collections.defaultdict(list)  # (backend, remedy) -> ops
    for name, (reasons, serving) in (ops | packed).items():
        order = AUTOMATIC[device.type] if name in ops else tuple(reasons)
        for backend in order[: order.index(serving)] if name in ops and serving in order else order:
            remedy = (reasons.get(backend) or "").partition("remedy: ")[2]
            if remedy:
                waiting[backend, remedy].append(name if name in ops else "packed layers")
    lines = [
        f"{backend} for {', '.join(dict.fromkeys(names))}: {remedy}" for (backend, remedy), names in waiting.items()
    ]
    if chosen_backend():
        lines.append(f"unset PROXSPARSE_BACKEND={chosen_backend()}: each op then uses the fastest backend")
    if device.type == "cpu" and torch.version.cuda is None and torch.version.hip is None:
        build = "install a CUDA or ROCm build of torch, then reinstall proxsparse"
        lines.append(f"torch {torch.__version__} is a CPU build: on a machine with a GPU, {build}")
    elif device.type == "cpu":
        lines.append("torch finds no GPU: check the driver (nvidia-smi or rocm-smi) and CUDA_VISIBLE_DEVICES")
    return lines


def op_rows(tensor: torch.Tensor) -> dict[str, tuple[dict, str | None]]:
    """Op -> (backend -> None or why it is unavailable, the backend selected for this tensor)."""
    ops = [op for op in list_ops() if op != "sparse_linear"]  # see `packed_rows`
    backends = [name for name in list_backends() if any(name in list_backends(op) for op in ops)]
    missing = dict.fromkeys(backends, "no kernel for this op")
    rows = {}
    for op in ops:
        reasons, serving = row(op, functools.partial(select, op), tensor, *TYPICAL_ARGUMENTS[op])
        rows[op] = missing | reasons, serving
    return rows


def packed_rows(device: torch.device) -> dict[str, tuple[dict, str | None]]:
    """The same for a packed layer of 4,096 features and inputs of several row counts."""
    rows, values = {}, torch.zeros(4096, 2048, dtype=torch.bfloat16, device=device)
    for count in (1, 16, 512):
        x = torch.zeros(count, 4096, dtype=torch.bfloat16, device=device)
        rows[f"{count} row{'s' * (count > 1)}"] = row("sparse_linear", select_kernel, x, values)
    return rows


def row(op: str, choose: Callable, *arguments) -> tuple[dict[str, str | None], str | None]:
    """(backend -> None or why it does not support these arguments, the backend of the kernel `choose(*arguments)`)."""
    reasons = {backend: get_kernel(op, backend).supports(*arguments) for backend in list_backends(op)}
    serving = None
    with contextlib.suppress(RuntimeError):  # an explicitly selected backend does not support these arguments
        serving = choose(*arguments).backend
    return reasons, serving


def table(rows: dict[str, tuple[dict, str | None]]) -> str:
    """A line per row, a column per backend ("selected" or "available"), then why the others ("-") are not available."""
    backends, lines, why_not = list(next(iter(rows.values()))[0]), [], collections.defaultdict(list)
    for row, (reasons, serving) in rows.items():
        words = {backend: "-" if reason else "available" for backend, reason in reasons.items()} | {serving: "selected"}
        lines.append([row, *(words[backend] for backend in backends)])
        for backend, reason in reasons.items():
            if reason is not None:
                why_not[backend, reason].append(row)
    reasons = [f"  {backend} for {', '.join(names)}: {reason}" for (backend, reason), names in why_not.items()]
    return "\n".join([text_table(["", *backends], lines), "", "why a backend is not available:", *reasons])


if __name__ == "__main__":
    sys.exit(run_command(main))
