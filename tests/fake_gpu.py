"""A fake GPU: within `with fake_gpu() as gpu:` whole jobs run on "cuda" and compute real numbers on the CPU.

A tensor made for "cuda" lies in CPU memory, and its storage carries a mark: so views, `.data` and `nn.Parameter` share
the device as they share the memory. `tensor.device` reports the mark. Every operation is checked, see device_rules.py.
torch's FakeTensorMode has no numbers: no `.item()`, no branch on a value, no file; and in a build of torch for CPUs no
`.to("cuda")` and no backward pass.

`gpu.waits` counts where the host waited for the GPU. A CUDA graph records the operations and repeats them on the same
memory, so that a step whose result depends on a number in Python gives wrong results here too. Kernels are not
launched: the CPU's compute in their place, on the same arguments.

What it cannot show: the kernels, streams, memory, speed, and what C++ code decides by itself from a tensor's device.
"""

import contextlib
import dataclasses
import types
from unittest import mock

import torch
from device_rules import CPU, DEVICE, GPU, PLAIN, FakeGPU, Generator, is_gpu, is_on_gpu, tensors_in
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from proxsparse.ops import choice, registry
from proxsparse.ops.backends import cpp, cuda
from proxsparse.reference import pack, quantize

__all__ = ["fake_gpu", "is_on_gpu"]


@contextlib.contextmanager
def fake_gpu(capability: tuple[int, int] = (9, 0), kernels: bool = True):
    """Within the block there is one GPU of this compute capability; yields its `FakeGPU`.

    `kernels`: whether the compiled CUDA extension is there. Triton is there if it is installed.
    """
    gpu = FakeGPU()
    forget()
    with contextlib.ExitStack() as stack:
        for name, value in tensor_attributes(gpu).items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, value))
        for name, value in cuda_functions(gpu, capability).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, on_its_device(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(functional, ATTENTION, composite(gpu, getattr(functional, ATTENTION))))
        stack.enter_context(mock.patch.object(torch._C, GROUPS, by_device_and_dtype))
        for where, name in AUTOCAST:
            stack.enter_context(mock.patch.object(where, name, of_the_cpu(getattr(where, name))))
        for op, table in registry._kernels.items():
            for backend in ("triton", "cuda") if kernels else ("triton",):
                if backend in table:
                    run = in_place_of_a_kernel(table[IN_PLACE.get(op, "reference")].run)
                    stack.enter_context(mock.patch.dict(table, {backend: dataclasses.replace(table[backend], run=run)}))
        extension = types.SimpleNamespace(gemv=gemv) if kernels else None
        reason = None if kernels else "the compiled CUDA extension is missing"
        stack.enter_context(mock.patch.multiple(cuda, _missing=reason, _C=extension))
        torch._C._ensureCUDADeviceGuardSet()  # a CUDA build without a GPU
        stack.callback(forget)
        stack.enter_context(gpu)
        yield gpu


def forget() -> None:
    """Empties the caches that depend on what GPU there is."""
    choice.forget()
    choice.device_kind.cache_clear()


def tensor_attributes(gpu: FakeGPU) -> dict:
    """Name -> what torch.Tensor has in its place."""

    def to(self: Tensor, *args, copy: bool = False, **kwargs) -> Tensor:
        if DEVICE(self) != CPU:
            return PLAIN["to"](self, *args, copy=copy, **kwargs)
        if args and isinstance(args[0], Tensor):  # torch's parser would take the device that C++ reports
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = device or self.device, dtype or self.dtype
        if device.type == "meta":
            return PLAIN["to"](self, device, dtype)
        if is_gpu(device) != is_on_gpu(self):
            return gpu.move(self, is_gpu(device), dtype, non_blocking)
        return PLAIN["to"](self, dtype, copy=copy, memory_format=memory_format or torch.preserve_format)

    def only_on_the_cpu(name: str):
        def method(self: Tensor, *args, **kwargs):
            if is_on_gpu(self):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            return PLAIN[name](self, *args, **kwargs)

        return method

    def tolist(self: Tensor):
        if is_on_gpu(self):
            gpu.wait("value")
        return PLAIN["tolist"](self)

    return {
        "device": property(lambda self: GPU if is_on_gpu(self) else DEVICE(self)),
        "is_cuda": property(is_on_gpu),
        "is_cpu": property(lambda self: DEVICE(self) == CPU and not is_on_gpu(self)),
        "to": to,
        "cpu": lambda self, **kwargs: to(self, CPU, **kwargs),
        "cuda": lambda self, device=None, **kwargs: to(self, GPU, **kwargs),
        "pin_memory": lambda self, *_: PLAIN["to"](self, self.dtype, copy=True),
        "numpy": only_on_the_cpu("numpy"),
        "__array__": only_on_the_cpu("__array__"),
        "tolist": tolist,
    }


def on_its_device(make):
    """torch.tensor or torch.as_tensor: the numbers are copied to the device afterwards, as torch does."""

    def made(data, dtype=None, device=None, **kwargs):
        if device is None and isinstance(data, Tensor):
            device = data.device
        return make(data, dtype=dtype, **kwargs).to(device) if device is not None else make(data, dtype=dtype, **kwargs)

    return made


ATTENTION = "scaled_dot_product_attention"


def composite(gpu: FakeGPU, function):
    """A function that torch takes apart before the operations are checked, and that makes tensors on the way."""

    def call(*args, **kwargs):
        with mock.patch.object(gpu, "inside", any(map(is_on_gpu, tensors_in(args, kwargs)))):
            return function(*args, **kwargs)

    return call


GROUPS = "_group_tensors_by_device_and_dtype"
PLAIN_GROUPS = getattr(torch._C, GROUPS)


def by_device_and_dtype(lists: list[list], *args) -> dict:
    """What torch's optimizers and clip_grad_norm_ group tensors with: all of a list are on one device here."""
    return {
        (groups[0][0].device, dtype): (groups, indices)
        for (_, dtype), (groups, indices) in PLAIN_GROUPS(lists, *args).items()
    }


AUTOCAST = [
    (torch.amp.autocast_mode.autocast, "__init__"),
    (torch, "is_autocast_enabled"),
    (torch, "get_autocast_dtype"),
    (torch.amp, "is_autocast_available"),
]


def of_the_cpu(function):
    """The same function; where an argument is "cuda" it is asked about the CPU, where the computations are."""

    def call(*args, **kwargs):
        args = ["cpu" if arg == "cuda" else arg for arg in args]
        kwargs = {name: "cpu" if value == "cuda" else value for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return call


def cuda_functions(gpu: FakeGPU, capability: tuple[int, int]) -> dict:
    """Name -> what torch.cuda has in its place."""
    nothing = contextlib.nullcontext
    stream = {"cuda_stream": 0, "wait_stream": lambda *_: None, "synchronize": lambda *_: gpu.wait("stream")}
    stream = type("Stream", (), stream)
    memory = 80 * 2**30
    properties = {"name": "fake GPU", "major": capability[0], "minor": capability[1], "total_memory": memory}
    properties = types.SimpleNamespace(**properties, multi_processor_count=132)
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nothing(),
        "device_of": lambda tensor: nothing(),
        "current_stream": lambda device=None: stream(),
        "Stream": stream,
        "stream": lambda stream: nothing(),
        "synchronize": lambda device=None: gpu.wait("device"),
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (memory, memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None if not is_on_gpu(state) else 1 / 0,
        "is_current_stream_capturing": lambda: gpu.graph is not None,
        "CUDAGraph": type("CUDAGraph", (FakeGraph,), {"gpu": gpu}),
        "graph": lambda graph, **_: graph.capture(),
    }


# What computes on the CPU too, so that all bits are equal. Its writes to memory are in no graph, the reference's are.
IN_PLACE_OPS = ("prox_nm_", "prox_nm_list_", "adamw_prox_", "masked_weight_")
IN_PLACE = {} if cpp._C is None else dict.fromkeys(IN_PLACE_OPS, "cpp")


def in_place_of_a_kernel(run):
    """What a kernel computes; every tensor has to be as a kernel reads it."""

    def checked(*args):
        for tensor in tensors_in(args):
            if not is_on_gpu(tensor) or not tensor.is_contiguous():
                raise RuntimeError(f"a kernel would read a tensor on {tensor.device} of strides {tensor.stride()}")
        return run(*args)

    return checked


def gemv(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    *_launch: int,
) -> None:
    """csrc/cuda/gemv.cu"""
    values = values if scales is None else quantize.dequantize(values, scales)
    y.copy_(functional.linear(x, pack.unpack_nm(values, indices), bias))


class FakeGraph:
    """torch.cuda.CUDAGraph: a capture changes no memory, a replay repeats its operations on the same memory."""

    gpu: FakeGPU

    def __init__(self):
        self.operations: list[tuple] = []
        self.before: dict[int, tuple] = {}  # of storages that are written in the capture

    @contextlib.contextmanager
    def capture(self):
        """Within the block all operations are recorded."""
        self.gpu.graph = self
        try:
            yield
        finally:
            self.gpu.graph = None
        with _disable_current_modes():
            for storage, content in self.before.values():
                storage.copy_(content)

    def keep(self, operation, args: tuple) -> None:
        """Notes what is in the memory that the operation writes."""
        schema = operation._schema.arguments
        for argument, value in zip(schema, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(value):
                    storage = tensor.untyped_storage()
                    self.before.setdefault(storage._cdata, (storage, storage.clone()))

    @torch.no_grad()
    def replay(self) -> None:
        """Repeats the operations; what they made in the capture gets the new numbers."""
        with _disable_current_modes():
            for operation, args, kwargs, results, new in self.operations:
                again = tensors_in(operation(*args, **kwargs))
                for old, fresh in zip(results, again, strict=True):
                    if any(old is one for one in new):
                        old.copy_(fresh)
