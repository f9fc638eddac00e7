"""torch's rules for devices, applied to tensors that are marked as on a GPU: fake_gpu.py.

For each operation: which mixtures of devices raise, on which device the results are, and where the host waits for the
GPU. CPU tensors of dimension 0 in pointwise operations and CPU indices of a tensor on the GPU are allowed.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import proxsparse

PACKAGE = Path(proxsparse.__file__).parent
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PLAIN = {name: getattr(torch.Tensor, name) for name in ("to", "numpy", "tolist", "__array__")}
DEVICE = torch._C.TensorBase.device.__get__  # what C++ reports
COPIES = {"copy_", "_to_copy", "_copy_from", "_foreach_copy_", "copy"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# Operations whose result the host has to know: a value, or how many elements there are.
READS = {"_local_scalar_dense", "equal", "is_nonzero", "_linalg_check_errors"}
COUNTS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount"}


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether the storage of the tensor carries the mark."""
    return tensor.layout == torch.strided and getattr(tensor.untyped_storage(), "on_gpu", False)


def mark(tensor: Tensor, on_gpu: bool = True) -> Tensor:
    """Puts the mark on the storage of the tensor, or takes it away."""
    tensor.untyped_storage().on_gpu = on_gpu
    return tensor


def tensors_in(*values) -> list[Tensor]:
    """All tensors in nested lists and dicts."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


class FakeGPU(TorchDispatchMode):
    """Checks every operation, and gives its results the device that they would have on a GPU."""

    def __init__(self):
        super().__init__()
        self.waits: Counter[str] = Counter()  # "what: file function" -> how often
        self.graph = None  # the CUDA graph that is being captured
        self.inside = False  # of a function of torch whose own temporary tensors are on the GPU

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), operation._schema.name.partition("::")[2]
        if operation.namespace == "proxsparse":
            with self:  # their implementations are Python functions: what they call is checked in turn
                return operation.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        wanted = kwargs.get("device")
        if is_gpu(wanted):
            kwargs["device"] = CPU
        inputs = tensors_in(args, kwargs)
        on_gpu = any(map(is_on_gpu, inputs)) or (self.inside and not inputs)
        if on_gpu:
            check_devices(operation, name, args, kwargs)
        check_generator(kwargs.get("generator"), on_gpu or is_gpu(wanted))
        if what := reason_to_wait(name, args, kwargs) if on_gpu else None:
            self.wait(what)
        if self.graph is not None:
            self.graph.keep(operation, args)
        result = operation(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in inputs if tensor.layout == torch.strided}
        new = [out for out in tensors_in(result) if out.layout == torch.strided]
        new = [out for out in new if out.untyped_storage()._cdata not in given]
        # an explicit device="cpu" that an operation was given with a tensor on the GPU is torch's own internal choice
        for out in new if on_gpu or is_gpu(wanted) else ():
            mark(out)
        if self.graph is not None:
            self.graph.operations.append((operation, args, kwargs, tensors_in(result), new))
        return result

    def wait(self, what: str) -> None:
        """Notes that the host waits for the GPU, and where; raises in a capture, as CUDA does."""
        if self.graph is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing ({what})")
        self.waits[f"{what}: {place_in_package()}"] += 1

    def move(self, tensor: Tensor, on_gpu: bool, dtype: torch.dtype, non_blocking: bool) -> Tensor:
        """A copy of the tensor on the other device."""
        if not non_blocking:
            self.wait("copy to the GPU" if on_gpu else "copy to the CPU")
        return mark(PLAIN["to"](tensor, dtype, copy=True), on_gpu)


def is_gpu(device) -> bool:
    """Whether this argument of a function names a GPU."""
    return device is not None and not isinstance(device, bool) and torch.device(device).type == "cuda"


def place_in_package() -> str:
    """ "file function" of the innermost frame that is in the package, else of a test."""
    frame, outer, inside = sys._getframe(2), "outside", ""
    while frame:
        path = Path(frame.f_code.co_filename)
        function = frame.f_code.co_qualname.partition(".<locals>")[0]
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE)} {function}{inside}"
        if path.name.startswith("test_") and outer == "outside":
            outer = f"{path.name} {function}"
        if "transformers" in path.parts:
            inside = ", in transformers"
        frame = frame.f_back
    return outer


def check_devices(operation, name: str, args: tuple, kwargs: dict) -> None:
    """Raises RuntimeError where torch does: some tensors on the GPU, others on the CPU."""
    if name in COPIES:
        return
    schema = operation._schema.arguments
    given = {**{arg.name: value for arg, value in zip(schema, args, strict=False)}, **kwargs}
    if name in INDEXING:
        indices = tensors_in(given.pop("indices"))
        if not is_on_gpu(given["self"]) and any(map(is_on_gpu, indices)):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        scalar = "values"
    else:
        scalar = "value"
    written = {arg.name for arg in schema if arg.alias_info is not None and arg.alias_info.is_write}
    pointwise = torch.Tag.pointwise in operation.tags
    found = {True: 0, False: 0}
    for argument, value in given.items():
        for tensor in tensors_in(value):
            allowed = argument not in written and (pointwise or argument == scalar)
            if DEVICE(tensor) == CPU and not (allowed and tensor.ndim == 0 and not is_on_gpu(tensor)):
                found[is_on_gpu(tensor)] += 1
    if all(found.values()):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
        )


PLAIN_GENERATOR = torch.Generator


class Generator(PLAIN_GENERATOR):
    """torch.Generator(device); one on the GPU is one of the CPU that reports the GPU as its device."""

    on_gpu: ClassVar[set[int]] = set()  # by the number that C++ has for it: an operation gets another Python object

    def __init__(self, device="cpu"):
        (Generator.on_gpu.add if is_gpu(device) else Generator.on_gpu.discard)(self._cdata)

    def __new__(cls, device="cpu"):
        return super().__new__(cls, CPU)

    @property
    def device(self) -> torch.device:
        return GPU if self._cdata in self.on_gpu else CPU


def check_generator(generator, on_gpu: bool) -> None:
    """Raises RuntimeError for a generator of random numbers on another device than the tensor."""
    if generator is not None and (generator._cdata in Generator.on_gpu) != on_gpu:
        expected, found = ("cuda", "cpu") if on_gpu else ("cpu", "cuda")
        raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{found}'")


def reason_to_wait(name: str, args: tuple, kwargs: dict) -> str | None:
    """None, or why the host waits for the GPU in this operation."""
    if name in READS:
        return "value"
    if name in COUNTS:
        return "number of elements"
    if name in INDEXING:
        (self, indices), values = args[:2], args[2] if len(args) > 2 else None
        masks = [index for index in tensors_in(indices) if index.dtype in (torch.bool, torch.uint8)]
        filling = values is not None and values.numel() == 1  # torch fills under the mask
        if is_on_gpu(self) and any(not is_on_gpu(index) for index in tensors_in(indices)):
            return "copy to the GPU"
        return "number of elements" if masks and not filling else None
    if name in ("copy_", "_copy_from") and is_on_gpu(args[0]) != is_on_gpu(args[1]):
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return None if non_blocking else "copy to the GPU" if is_on_gpu(args[0]) else "copy to the CPU"
    return None
