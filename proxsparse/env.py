"""`proxsparse env`: versions, the backend of each op on this machine, why others are unavailable, and how to fix it."""

import collections
import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import partial

import torch

import proxsparse
from proxsparse.errors import run_command
from proxsparse.io.text_table import text_table
from proxsparse.ops.registry import chosen_backend, get_kernel, list_backends, select
from proxsparse.ops.sparse_linear import select_kernel
from proxsparse.runtime.command import Parser
from proxsparse.runtime.device import choose_device, device_name, version

PACKAGES = ("torch", "triton", "transformers", "datasets", "safetensors", "gguf", "matplotlib", "lm-eval")
# Typical arguments after the tensor, passed to `supports` of the kernels of each op.
TYPICAL_ARGUMENTS = {
    "prox_nm_": (0.1, 2, 4),
    "adamw_prox_": (None,) * 5 + (1, 1e-3, 0.9, 0.999, 1e-8, 0.0, 0.1, 2, 4, None),
    "nm_mask": (2, 4),
    "masked_weight_": (None, None, None, 2, 4),
    "pack_nm": (),
    "unpack_nm": (None,),
    "quantize_nm": (4,),
    "dequantize_nm": (None, None),
}


def main(arguments: list[str] | None = None) -> int:
    """Prints versions, the backend of each op and of packed layers, and the remedies for unavailable backends."""
    Parser("env", description="Print " + __doc__.partition(": ")[2]).parse_args(arguments)
    device = choose_device("auto")
    table, reasons = survey(device)
    print(f"proxsparse {proxsparse.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"device {device_name(device)}, threads: {torch.get_num_threads()}")
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    print(f"CUDA {torch.version.cuda or 'none'}, ROCm {torch.version.hip or 'none'} (of this build of torch)")
    print(f"compilers: {program_version(os.environ.get('CXX') or 'c++')}; nvcc {program_version('nvcc')}")
    print(f"\nbackends for a bfloat16 2:4 weight on {device}; explicitly selected: {chosen_backend() or 'none'}")
    print(table)
    print("\nwhy a backend is not available:")
    print("\n".join(f"  {line}" for line in [*reasons, *advice(device)] or ["all are available"]))
    return 0


def program_version(program: str) -> str:
    """The line of `program --version` that contains the version; "missing" if the program is not on PATH."""
    path = shutil.which(program)
    if path is None:
        return "missing"
    lines = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    return next((line.strip() for line in lines if re.search(r"\d+\.\d+", line)), path)


def survey(device: torch.device) -> tuple[str, list[str]]:
    """A table of the backends of each op, and why some are not available, with the remedy, a line for each reason.

    A backend is "selected", "available", "-" (see the reasons), or "" without a kernel for the op. `sparse_linear` has
    a row for inputs of 1, 16 and 512 rows, for a layer of 4,096 features.
    """
    weight = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
    calls = {op: (op, partial(select, op), (weight, *arguments)) for op, arguments in TYPICAL_ARGUMENTS.items()}
    values = torch.zeros(4096, 2048, dtype=torch.bfloat16, device=device)
    for count in (1, 16, 512):
        x = torch.zeros(count, 4096, dtype=torch.bfloat16, device=device)
        calls[f"sparse_linear({count} rows)"] = "sparse_linear", select_kernel, (x, values)
    rows, refused = [], collections.defaultdict(list)  # the latter: (backend, reason) -> names
    for name, (op, choose, arguments) in calls.items():
        words = {}
        for backend in list_backends(op):
            reason = get_kernel(op, backend).supports(*arguments)
            words[backend] = "available" if reason is None else "-"
            if reason is not None:
                refused[backend, reason].append(name)
        with contextlib.suppress(RuntimeError):  # an explicitly selected backend does not support these arguments
            words[choose(*arguments).backend] = "selected"
        rows.append([name, *(words.get(backend, "") for backend in list_backends())])
    reasons = [f"{backend} for {', '.join(names)}: {reason}" for (backend, reason), names in refused.items()]
    return text_table(["", *list_backends()], rows), reasons


def advice(device: torch.device) -> list[str]:
    """What else makes a faster backend available."""
    lines = []
    if chosen_backend():
        lines.append(f"unset PROXSPARSE_BACKEND={chosen_backend()}: each op then uses the fastest backend")
    if device.type == "cpu" and torch.version.cuda is None and torch.version.hip is None:
        build = "install a CUDA or ROCm build of torch, then reinstall proxsparse"
        lines.append(f"torch {torch.__version__} is a CPU build: on a machine with a GPU, {build}")
    elif device.type == "cpu":
        lines.append("torch finds no GPU: check the driver (nvidia-smi or rocm-smi) and CUDA_VISIBLE_DEVICES")
    return lines


if __name__ == "__main__":
    sys.exit(run_command(main))
