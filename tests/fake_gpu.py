"""A fake GPU: within `with fake_gpu() as gpu:` jobs run on "cuda" and compute real numbers on the CPU.

A tensor made for "cuda" lies in CPU memory. Its storage carries a mark, which `tensor.device` reports, and which views,
`.data` and `nn.Parameter` share. Every dispatched operation passes through `FakeGPU`:

- An operation with tensors on both devices raises an error, as on CUDA.
- `gpu.waits` counts the waits of the host for the device: "operation: module function" -> how often.

Autocast and attention are those of the CPU.
"""

import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proxsparse import train
from proxsparse.ops import choice, registry

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
REAL_DEVICE = torch._C.TensorBase.device.__get__  # what C++ reports
REAL = {name: getattr(Tensor, name) for name in ("to", "numpy", "tolist")}
REAL_GROUPS = torch._C._group_tensors_by_device_and_dtype
AUTOCAST = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
KERNELS = ("triton", "cuda", "gemv")  # backends that the fake GPU has, computed by the CPU's kernel or the reference
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# Operations of which the host has to know the result: a value, or the number of elements.
READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "repeat_interleave", "bincount")


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether the storage of the tensor carries the mark."""
    return tensor.layout == torch.strided and getattr(tensor.untyped_storage(), "on_gpu", False)


def tensors_in(*values) -> list[Tensor]:
    """All strided tensors in nested lists and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


class FakeGPU(TorchDispatchMode):
    """Checks every operation, counts waits, and marks results."""

    def __init__(self):
        super().__init__()
        self.waits, self.in_kernel = Counter(), False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), operation._schema.name.partition("::")[2]
        if operation.namespace == "proxsparse":  # implemented in Python: the operations in it are dispatched in turn
            with self:
                return operation.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        inputs = tensors_in(args, kwargs)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        elif not any(map(is_on_gpu, inputs)):
            return operation(*args, **kwargs)
        if not self.in_kernel:
            check_devices(name, args, inputs)
            if has_to_wait(name, args):
                self.wait(name)
        result = operation(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in tensors_in(result):
            if tensor.untyped_storage()._cdata not in given:
                tensor.untyped_storage().on_gpu = True
        return result

    def wait(self, what: str) -> None:
        """Counts a wait of the host in the innermost function outside torch."""
        frame = sys._getframe(1)
        while (module := frame.f_globals.get("__name__", "torch")).partition(".")[0] in ("torch", __name__):
            frame = frame.f_back
        self.waits[f"{what}: {module} {frame.f_code.co_name}"] += 1

    def kernel(self, run: Callable) -> Callable:
        """`run`, whose operations count as no waits."""

        def call(*args, **kwargs):
            check_devices("a kernel", args, tensors_in(args))
            with mock.patch.object(self, "in_kernel", True):
                return run(*args, **kwargs)

        return call


def check_devices(name: str, args: tuple, inputs: list[Tensor]) -> None:
    """Raises RuntimeError if tensors are on two devices; a number and an index on the CPU are allowed."""
    if name in INDEXING and is_on_gpu(args[0]):
        inputs = tensors_in(args[0], args[2:])
    if name != "copy_" and len({is_on_gpu(tensor) for tensor in inputs if tensor.ndim or is_on_gpu(tensor)}) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu! ({name})")


def has_to_wait(name: str, args: tuple) -> bool:
    """Whether the host waits for the GPU in this operation."""
    if name == "copy_":
        return is_on_gpu(args[0]) != is_on_gpu(args[1]) and not (len(args) > 2 and args[2])
    if name in INDEXING:
        fills = len(args) > 2 and args[2].numel() == 1  # one value under a mask: its places are not counted
        indices = tensors_in(args[1])
        return any(not is_on_gpu(index) or (index.dtype == torch.bool and not fills) for index in indices)
    return name in READS


def tensor_attributes(gpu: FakeGPU) -> dict:
    """Name -> what torch.Tensor has in its place."""

    def to(self: Tensor, *args, copy: bool = False, **kwargs) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = device or self.device, dtype or self.dtype
        if "meta" in (self.device.type, device.type) or device.type == self.device.type:
            device = CPU if device.type == "cuda" else device
            return REAL["to"](self, device, dtype, copy=copy, memory_format=memory_format)
        if not non_blocking:
            gpu.wait(f"copy to {device.type}")
        moved = gpu.kernel(REAL["to"])(self, dtype, copy=True)
        moved.untyped_storage().on_gpu = device.type == "cuda"
        return moved

    def numpy(self: Tensor, **kwargs):
        if is_on_gpu(self):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return REAL["numpy"](self, **kwargs)

    moves = {
        "pin_memory": lambda self: self,
        "to": to,
        "cpu": lambda self: to(self, CPU),
        "cuda": lambda self, device=GPU: to(self, device),
    }
    reads = {"numpy": numpy, "tolist": lambda self: REAL["tolist"](to(self, CPU) if is_on_gpu(self) else self)}
    device = property(lambda self: GPU if is_on_gpu(self) else REAL_DEVICE(self))
    return {"device": device, "is_cuda": property(is_on_gpu), **moves, **reads}


def on_device(make: Callable) -> Callable:
    """torch.tensor or torch.as_tensor: makes a tensor on the CPU and moves it, as torch does."""
    return lambda *args, device=None, **kwargs: make(*args, **kwargs).to(device=device)


def on_cpu(function: Callable) -> Callable:
    """A function of autocast; if it is asked about "cuda", it answers for the CPU."""
    return lambda *args: function(*("cpu" if arg == "cuda" else arg for arg in args))


def groups_by_mark(lists: list[list], *args) -> dict:
    """The groups by device and dtype of clip_grad_norm_ and of torch's optimizers, with the marked device."""
    found = REAL_GROUPS(lists, *args)
    return {(tensors[0][0].device, dtype): (tensors, places) for (_, dtype), (tensors, places) in found.items()}


@contextlib.contextmanager
def fake_gpu():
    """Within the block "cuda" is a fake GPU with kernels for all ops that have one; yields its `FakeGPU`."""
    gpu = FakeGPU()
    cuda = {"_lazy_init": lambda: None, "is_available": lambda: True, "synchronize": lambda *_: gpu.wait("synchronize")}
    cuda |= {"get_device_capability": lambda *_: (9, 0), "get_device_name": lambda *_: "fake GPU"}
    cuda |= {"max_memory_allocated": lambda *_: 0, "is_bf16_supported": lambda *_: True}
    functions = {name: on_cpu(getattr(torch, name)) for name in AUTOCAST}
    functions |= {name: on_device(getattr(torch, name)) for name in ("tensor", "as_tensor")}
    changes = [(Tensor, tensor_attributes(gpu)), (torch.cuda, cuda), (torch, functions)]
    changes += [(torch._C, {"_group_tensors_by_device_and_dtype": groups_by_mark})]
    changes += [(choice, {"device_kind": lambda device: device.type, "_choices": {}})]  # caches stay as they were
    _device_constructors()  # cached: `with torch.device(...)` must find the real functions there
    with contextlib.ExitStack() as stack:
        for place, changed in changes:
            stack.enter_context(mock.patch.multiple(place, **changed))
        for table in registry._kernels.values():
            run = gpu.kernel(table.get("cpp", table["reference"]).run)
            kernels = {name: registry.Kernel(name, run, lambda *args: None) for name in KERNELS if name in table}
            stack.enter_context(mock.patch.dict(table, kernels))
        yield stack.enter_context(gpu)


def waits_of_step(flags: list[str], log_points: int = 1000) -> Counter[str]:
    """Of a step of `proxsparse train` with these flags, from runs of 4 steps and of 2."""
    counted = {}
    with tempfile.TemporaryDirectory() as folder:
        for steps in (2, 4):
            with fake_gpu() as counted[steps], mock.patch("proxsparse.training.state.LOG_POINTS", log_points):
                train.main([*flags, "--device", "cuda", "--max_steps", str(steps), "--output_dir", f"{folder}/{steps}"])
    waits = {place: (count - counted[2].waits[place]) / 2 for place, count in counted[4].waits.items()}
    return +Counter(waits)
