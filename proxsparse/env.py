"""`proxsparse env`: versions, which backend serves which op on this machine, why not another, what would be faster."""

import collections
import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys

import torch

import proxsparse
from proxsparse.errors import run_command
from proxsparse.inference import backends as inference
from proxsparse.inference.choice import choose
from proxsparse.inference.linear import AUTO, explicit
from proxsparse.ops.registry import AUTOMATIC, BACKENDS, chosen_backend, get_kernels, list_ops, select
from proxsparse.runtime.command import Parser
from proxsparse.runtime.device import choose_device, device_name, version

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
    """Prints versions, which backend serves each op and a packed layer, why others do not, and what to do for them."""
    Parser("env", description=__doc__.partition(": ")[2]).parse_args(arguments)
    device = choose_device("auto")
    ops = op_rows(torch.zeros(4, 8, dtype=torch.bfloat16, device=device))
    packed = packed_rows(device)
    print(f"proxsparse {proxsparse.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"device {device_name(device)}, {torch.get_num_threads()} threads")
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    print(f"CUDA {torch.version.cuda or 'missing'}, ROCm {torch.version.hip or 'missing'} (of this torch)")
    print(f"compilers: {program_version(os.environ.get('CXX') or 'c++')}; nvcc {program_version('nvcc')}")
    print(f"\nbackends of a bfloat16 2:4 weight on {device}, chosen explicitly: {chosen_backend() or 'none'}")
    print(table(ops))
    print(f'\nbackends of a packed bfloat16 layer (SparseLinear) on {device}, backend="auto"')
    print(table(packed))
    print("\nfor a faster backend:")
    print("\n".join(f"  {line}" for line in faster(ops, packed, device) or ["nothing to do on this machine"]))
    return 0


def program_version(program: str) -> str:
    """The line of `program --version` that names the version; "missing" if it is not on PATH."""
    path = shutil.which(program)
    if path is None:
        return "missing"
    lines = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    return next((line.strip() for line in lines if re.search(r"\d+\.\d+", line)), path)


def faster(ops: dict[str, tuple], packed: dict[str, tuple], device: torch.device) -> list[str]:
    """A line for each thing to do so that a faster backend can serve: the remedies of those that cannot."""
    waiting = collections.defaultdict(list)  # backend and remedy -> what it would serve
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
        lines.append(f"unset PROXSPARSE_BACKEND={chosen_backend()}: the fastest backend then serves each op")
    if device.type == "cpu" and torch.version.cuda is None and torch.version.hip is None:
        build = "install a CUDA or ROCm build of torch, then proxsparse again"
        lines.append(f"torch {torch.__version__} is a CPU build: on a machine with a GPU, {build}")
    elif device.type == "cpu":
        lines.append("torch finds no GPU: check the driver (nvidia-smi or rocm-smi) and CUDA_VISIBLE_DEVICES")
    return lines


def op_rows(tensor: torch.Tensor) -> dict[str, tuple[dict, str | None]]:
    """Op -> (backend -> None or why it does not serve, the backend that serves a call like this one)."""
    rows = {}
    for op in list_ops():
        reasons = dict.fromkeys(BACKENDS, "it has no kernel for this op")
        reasons |= {kernel.backend: kernel.supports(tensor, *TYPICAL_ARGUMENTS[op]) for kernel in get_kernels(op)}
        serving = None
        with contextlib.suppress(RuntimeError):  # an explicit choice that cannot serve this op
            serving = select(op, tensor, *TYPICAL_ARGUMENTS[op]).backend
        rows[op] = reasons, serving
    return rows


def packed_rows(device: torch.device) -> dict[str, tuple[dict, str | None]]:
    """The same for the rows of x that a packed layer multiplies, of 4,096 features."""
    rows, values = {}, torch.zeros(4096, 2048, dtype=torch.bfloat16, device=device)
    for count in (1, 16, 512):
        x = torch.zeros(count, 4096, dtype=torch.bfloat16, device=device)
        reasons = {name: inference.backend(name).supports(x, values) for name in inference.backends()}
        insisted = explicit(AUTO)
        serving = choose(x, values).name if insisted == AUTO else insisted
        rows[f"{count} rows"] = reasons, None if reasons[serving] else serving
    return rows


def table(rows: dict[str, tuple[dict, str | None]]) -> str:
    """A line a row, a column a backend ("serves", "ready" behind it, "-"), and why not."""
    backends = list(next(iter(rows.values()))[0])
    width = max(map(len, rows)) + 2
    lines, why_not = [" " * width + "".join(f"{backend:<12}" for backend in backends)], []
    for row, (reasons, serving) in rows.items():
        words = {backend: "-" if reason else "ready" for backend, reason in reasons.items()} | {serving: "serves"}
        lines.append(f"{row:<{width}}" + "".join(f"{words[backend]:<12}" for backend in backends))
        why_not += [f"  {row} on {backend}: {reason}" for backend, reason in reasons.items() if reason is not None]
    return "\n".join([*lines, "", "why not:", *why_not])


if __name__ == "__main__":
    sys.exit(run_command(main))
