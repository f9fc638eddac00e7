"""What a run holds on each of N devices, bucket by bucket in bytes, from the model's shape and the flags alone."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch._subclasses import fake_tensor

from proxsparse.errors import InputError
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.plan.activations import StepBytes, keep_two_blocks_, logits_bytes, step_bytes
from proxsparse.plan.architecture import architecture, causal_without_mask_
from proxsparse.run.config import TrainConfig
from proxsparse.runtime.device import PRECISIONS, choose_precision
from proxsparse.training.distillation import KEPT_TOKENS

Buckets = dict[str, int]  # name -> bytes

# Resident memory of a run on a model of 100 KB (530 MB, of them 206 of libraries), and of SmolLM2's tokenizer; Linux
# x86-64, torch 2.13 for CPUs, transformers 5.23: benchmarks/plan_check.py.
PROCESS = 560 * 10**6
# On a CPU malloc keeps freed pieces between those in use: 5% to 15% of the tensors in plan_check.py's runs, nothing
# where every tensor is a mapping of its own (MALLOC_MMAP_THRESHOLD_=65536).
FRAGMENTS = 0.10
MAPPED = 2**25  # bytes from which glibc gives a tensor a mapping of its own, and back to the system when it is freed
CUDA_CONTEXT = 500 * 10**6  # and the libraries' workspaces: assumed, no GPU has been seen
FP32 = 4
TEXT_BYTES = 3 * 8  # a token: its id, its label, its mask, int64
FLAGS_OF_THE_PASSES = (
    *("precision", "seq_len", "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("step_in_backward", "update", "distill", "eval_data", "eval_seq_len"),
)
TEACHER_BYTES = KEPT_TOKENS * (4 + 2)  # a token: int32 tokens, bfloat16 probabilities


@dataclass(frozen=True)
class Shape:
    """A model in numbers of weights: `block` of its largest decoder block, `outside` of all that is in none."""

    source: str
    file_bytes: int  # of a weight in the model's files
    mapped: bool  # whether W0 can stay in the files; those of GGUF have to be unpacked into memory
    blocks: int
    layers: int
    weights: int
    prunable: int
    block: int
    outside: int
    largest_layer: int
    linear: int  # in products with activations, lm_head's among them
    attention: int  # heads * head_dim, over all blocks
    learned_names: dict[str, frozenset[str]]  # --update -> parameters that get a gradient
    shallow: nn.Module
    counted: dict[tuple, "Traced"] = field(default_factory=dict)

    def learned(self, config: TrainConfig) -> int:
        """How many weights get a gradient."""
        return self.prunable if config.update == "prunable" else self.weights


@dataclass(frozen=True)
class Traced:
    """Bytes that the meta device counted: of a training step, and of the largest forward pass without gradients."""

    step: StepBytes
    logits: int


def shape_of(config: TrainConfig) -> Shape:
    """The shape of --model. Raises InputError as `architecture` and `prunable_layers` do."""
    found = architecture(config.model)
    model, settings = found.model, found.model.config.get_text_config()
    layers = prunable_layers(model, config.pattern, config.include, config.exclude)
    blocks = decoder_blocks(model)
    inside = {id(parameter) for parameter in blocks.parameters()}
    sizes = [layer.weight.numel() for layer in layers.values()]
    heads = settings.num_attention_heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    prunable = frozenset(f"{name}.weight" for name in layers)
    shape = Shape(
        source=found.source,
        file_bytes=found.file_dtype.itemsize,
        mapped=found.mapped,
        blocks=len(blocks),
        layers=len(layers),
        weights=sum(parameter.numel() for parameter in model.parameters()),
        prunable=sum(sizes),
        block=max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks),
        outside=sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside),
        largest_layer=max(sizes),
        linear=sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)),
        attention=heads * head_dim * len(blocks),
        learned_names={"prunable": prunable, "all": frozenset(name for name, _ in model.named_parameters())},
        shallow=model,
    )
    keep_two_blocks_(model)
    window = getattr(settings, "sliding_window", None)
    if config.per_device_train_batch_size == 1 and (window is None or config.seq_len < window):
        causal_without_mask_(model)  # one document is never padded
    return shape


def dtypes_of(config: TrainConfig) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtypes of the weights and of autocast; a GPU that is not here is taken for one that multiplies bf16 fast."""
    if config.precision == "auto" and runs_on_gpu(config):
        return PRECISIONS["mixed"]
    return choose_precision(config.precision, torch.device("cpu"))


def moment_dtype_of(config: TrainConfig) -> str:
    """--moment_dtype, or its default."""
    return config.moment_dtype or ("bf16" if config.precision == "bf16" else "fp32")


def runs_on_gpu(config: TrainConfig) -> bool:
    """Whether --device means a GPU, which need not be here."""
    return config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())


def traced(shape: Shape, config: TrainConfig) -> Traced:
    """What these flags make the model hold in its passes, counted once for each set of them.

    Raises:
        InputError: what the model computes depends on its data, as in a mixture of experts.
    """
    key = tuple(getattr(config, name) for name in FLAGS_OF_THE_PASSES)
    if key not in shape.counted:
        shape.counted[key] = count_passes(shape, config)
    return shape.counted[key]


def count_passes(shape: Shape, config: TrainConfig) -> Traced:
    """`traced`, now."""
    dtypes = dtypes_of(config)
    data_decides = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
    try:
        step = step_bytes(shape.shallow, config, dtypes, shape.learned_names[config.update])
        windows = [1] if config.distill == 0 else [1, config.seq_len]
        windows += [config.eval_seq_len] if config.eval_data != "none" else []
        return Traced(step, logits_bytes(shape.shallow, dtypes, 1, max(windows)))
    except data_decides as error:
        raise InputError(
            f"--plan: what {type(shape.shallow).__name__} computes depends on its data ({error.func}), so that its "
            "activations cannot be counted before; run without --plan"
        ) from error


def held(shape: Shape, config: TrainConfig) -> Buckets:
    """What N devices share from the first step to the last; every device has 1/N of it."""
    weight, learned = dtypes_of(config)[0].itemsize, shape.learned(config)
    return {
        "weights": weight * shape.weights,
        "learned weights": weight * shape.prunable if config.forward == "masked" else 0,
        "moments": 2 * (2 if moment_dtype_of(config) == "bf16" else FP32) * learned,
        "masters": FP32 * learned if config.master_weights else 0,
        "W0": shape.file_bytes * shape.weights if config.pretrained_weights == "device" else 0,
        "W0 of the frozen term": weight * shape.prunable if config.frozen_lambda else 0,
        "start and sum of the runs": (weight + FP32) * learned if config.average_runs > 1 else 0,
    }


def moments_of_a_run(shape: Shape, config: TrainConfig, found: Traced, devices: int) -> dict[str, Buckets]:
    """What a device holds at each moment that can be the peak: moment -> buckets.

    Gradients grow while activations shrink, both by as much in every decoder block: the most is at one of the two ends.
    """
    weight, learned = dtypes_of(config)[0].itemsize, shape.learned(config)
    share = {name: size // devices for name, size in held(shape, config).items()}
    gradients = 0 if config.step_in_backward else weight * learned // devices
    gathered = weight * (2 * shape.block + shape.outside) if devices > 1 else 0
    # FSDP2 keeps the gradients of a unit, and the buffer in which they leave; all that is outside of blocks is one unit
    outside = shape.outside if config.update == "all" else 0
    leaving = 2 * weight * (shape.block + outside) if devices > 1 else 0
    others = (shape.blocks - 2) * found.step.kept
    first = {"activations": found.step.until_first + others, "gathered": gathered + leaving}
    if config.gradient_accumulation_steps > 1:
        first["gradients"] = gradients
    elif not runs_on_gpu(config) and weight * shape.largest_layer < MAPPED:
        # malloc has kept the gradients of the step before, and puts the decoder blocks' activations there
        first["freed gradients"] = max(0, min(gradients, weight * shape.prunable // devices) - others)
    last = {"activations": found.step.from_first, "gathered": gathered + leaving, "gradients": gradients}
    # m = W0 where the mask keeps: c * v, sign(W0), their product and W0 of one layer at a time
    new_mask = 4 * weight * shape.largest_layer // devices if config.forward == "masked" else 0
    step = {"gradients": gradients, "one layer's new mask": new_mask}
    masks = 0 if runs_on_gpu(config) else two_masks(shape, devices)
    return {
        "the loss, and the last decoder blocks' backward pass": share | first,
        "the first decoder block's backward pass": share | last,
        "the optimizer's step": share | step,
        "the perplexity": share | {"activations": found.logits, "gathered": gathered, "two masks": masks},
    }


def two_masks(shape: Shape, devices: int) -> int:
    """The learned and the magnitude mask of the rows of a device, a byte a weight, in the memory of the host."""
    return 2 * shape.prunable // devices


def on_device(shape: Shape, config: TrainConfig, found: Traced, devices: int) -> tuple[str, Buckets]:
    """The moment of the peak of each of so many devices, and what it holds then, without what is empty."""
    moments = moments_of_a_run(shape, config, found, devices)
    peak = max(moments, key=lambda moment: sum(moments[moment].values()))
    fragments = {"fragments of the heap": int(FRAGMENTS * sum(moments[peak].values()))}
    overhead = {"CUDA context (assumed)": CUDA_CONTEXT} if runs_on_gpu(config) else fragments
    return peak, {name: size for name, size in (moments[peak] | overhead).items() if size}


def on_host(shape: Shape, config: TrainConfig, devices: int) -> Buckets:
    """What a process holds in the memory of the host beside its device."""
    tokens = config.num_samples * config.seq_len
    on_cpu = config.pretrained_weights == "cpu" or (config.pretrained_weights == "disk" and not shape.mapped)
    buckets = {
        "process": PROCESS,
        "W0": shape.file_bytes * shape.weights // devices if on_cpu else 0,
        "two masks, at the end": two_masks(shape, devices) if runs_on_gpu(config) else 0,  # else at their moment
        "calibration text": TEXT_BYTES * tokens,
        "teacher": TEACHER_BYTES * tokens if config.distill else 0,
    }
    return {name: size for name, size in buckets.items() if size}
