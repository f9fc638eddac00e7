"""The memory of a run, by formulas from the model's config and the flags; nothing is loaded. Printed by `--plan`."""

import copy
from collections.abc import Iterable
from pathlib import Path
from shutil import disk_usage

import torch
from torch import nn

from proxsparse.data.tokens import TOKENS_IN_MEMORY
from proxsparse.errors import InputError
from proxsparse.io.checkpoints import FILE_BYTES
from proxsparse.io.model_files import refuse_quantized
from proxsparse.io.text_table import text_table
from proxsparse.models.checks import fit_window
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.models.loading import auto_class, import_transformers, locate, one_line
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.run.args import HIDDEN, RunArgs
from proxsparse.runtime.device import PRECISIONS, choose_precision, free_memory
from proxsparse.training.loss import rows_at_a_time
from proxsparse.training.options import FinetuneOptions

GB, FP32, BF16 = 10**9, 4, 2
TOKEN_BYTES = 4  # per calibration token
PROCESS = 850 * 10**6  # libraries and tokenizer: VmHWM of a run on a model of 100 KB, torch 2.14 with CUDA, x86-64
MARGIN = 1.1  # plans are up to 10% above the measured peak, see docs/scaling.md
SMALLER = (  # section, flag and value that need less memory, in the order in which they are suggested
    ("training", "per_device_train_batch_size", 1),
    ("hardware", "precision", "bf16"),
    ("training", "gradient_checkpointing", True),
    ("hardware", "pretrained_weights", "disk"),
)
OF_RANK_ZERO = ("model for saving", "masks of all devices")  # on the host
CUDA_CONTEXT = 500 * 10**6  # with the workspaces of the libraries: assumed, not measured

Items = dict[str, float]  # what -> bytes


class Plan:
    """The sizes of a model and a run, and the formulas."""

    def __init__(self, args: RunArgs):
        model, self.file_dtype = meta_model(args.model.model)
        layers = prunable_layers(model, args.model.pattern or "2:4", args.model.include, args.model.exclude)
        self.args, self.options, hardware = args, args.training, args.hardware
        self.finetune = isinstance(self.options, FinetuneOptions)
        self.on_gpu = hardware.device.startswith("cuda") or (hardware.device == "auto" and torch.cuda.is_available())
        self.dtype, self.autocast = choose_precision(hardware.precision, torch.device("cpu"))
        if hardware.precision == "auto" and self.on_gpu:  # the GPU may be in another machine
            self.dtype, self.autocast = PRECISIONS["mixed"]
        self.compute = (self.autocast or self.dtype).itemsize  # bytes of a number in products
        self.window = fit_window(model, args.data.seq_len, args.data.window, "seq_len")
        self.tokens = self.window * self.options.per_device_train_batch_size  # of a pass
        config = model.config.get_text_config()
        self.knows_activations = config.model_type in ("llama", "mistral", "qwen2")
        self.hidden, heads = config.hidden_size, config.num_attention_heads
        self.width = heads * (getattr(config, "head_dim", None) or self.hidden // heads)  # of the attention
        of_an_expert = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
        self.intermediate = (of_an_expert or 4 * self.hidden) * (getattr(config, "num_experts_per_tok", None) or 1)
        self.vocabulary = len(model.get_output_embeddings().weight)
        # numbers of weights
        blocks = decoder_blocks(model)
        self.weights, self.blocks = numel(model.parameters()), [numel(block.parameters()) for block in blocks]
        self.layers = [layer.weight.numel() for layer in layers.values()]
        self.prunable, vectors = sum(self.layers), numel(p for p in model.parameters() if p.ndim == 1)
        learned = {"prunable": self.prunable, "all": self.weights, "kept": self.prunable + vectors}
        self.learned = learned["kept" if self.finetune else "prunable" if self.options.masked else "all"]

    def masked_size(self, devices: int) -> int:
        """Bytes per pruned weight of the model, and of its gradient, see `training.learnable_layer`."""
        options, same = self.options, self.autocast == self.file_dtype
        short = not self.finetune and options.masked and same and options.gradient_accumulation_steps == devices == 1
        return self.compute if short else self.dtype.itemsize

    def block_bytes(self, devices: int) -> int:
        """About what a decoder block of a Llama keeps for its backward pass, w bytes per weight, c bytes in products.

        Per token: two norms keep inputs and scales in fp32, and 4 w for their outputs and copies; the attention q, k, v
        and its output; the MLP gate, silu(gate), up and the product. A layer keeps the copy of its weight that
        autocast has cast.
        """
        a_token = self.hidden * (2 * FP32 + 4 * self.dtype.itemsize)
        a_token += 4 * self.compute * (self.width + self.intermediate)
        cast = self.autocast and self.masked_size(devices) > self.compute
        return self.tokens * a_token + (self.compute * max(self.blocks) if cast else 0)

    def memory(self, devices: int = 1) -> dict[str, Items]:
        """The peak memory of one of N devices, of its process on the host (rank zero), and of the disk.

        Returns:
            device (if it is not the CPU), host, disk -> item -> bytes, at the moment when this place is fullest.
        """
        options, hardware = self.options, self.args.hardware
        w, f, mine, several = self.dtype.itemsize, self.file_dtype.itemsize, 1 / devices, devices > 1
        masks, keep = self.prunable * mine, hardware.pretrained_weights or "cpu"
        moments = 2 * (BF16 if (options.moment_dtype or hardware.precision) == "bf16" else FP32)
        frozen = w * self.prunable * (not self.finetune and options.frozen_lambda > 0)
        held_out = self.finetune and options.held_out != 0
        outside = self.weights - sum(self.blocks)
        m = self.masked_size(devices)
        held = {
            "weights": (w * (self.weights - self.prunable) + m * self.prunable) * mine,
            "W0": f * self.weights * mine * (keep == "device"),
            "masks": masks * self.finetune,
            "teacher": w * self.weights * mine * (self.finetune and options.distill > 0),
            "learned weights": w * self.prunable * mine * (not self.finetune and options.masked),
            "moments": moments * self.learned * mine,
            "master weights": FP32 * self.learned * mine * options.master_weights,
            "W0 of the frozen-weight term": frozen * mine,
            "best weights": w * self.learned * mine * held_out,
            # FSDP2 gathers a block while another computes, and sends the gradients of a block from a copy
            "gathered": several * w * (4 * max(self.blocks) + outside),
        }
        gradients = m * self.learned * mine
        kept = w * self.tokens * self.hidden if options.gradient_checkpointing else self.block_bytes(devices)
        # logits, their gradient in parts and as a whole, and the teacher's; log p, log q and their gradients in fp32
        logits = self.compute * (3 + (options.distill > 0)) * self.tokens * self.vocabulary
        rows = min(self.tokens, rows_at_a_time(self.on_gpu, self.vocabulary))
        logits += 2 * FP32 * (1 + (options.distill > 0)) * rows * self.vocabulary
        forward = {"activations": len(self.blocks) * kept, "logits": logits}
        if not self.finetune and options.match_hidden:  # the states of the dense model, and their differences
            forward["activations"] += (w + FP32) * self.tokens * self.hidden * (len(self.blocks) - 1)
        if options.gradient_accumulation_steps > 1 or not self.on_gpu:  # malloc keeps the memory of freed tensors
            forward["gradients"] = gradients
        backward = {"activations": self.block_bytes(devices), "gradients": gradients}
        step = {"gradients": gradients, "gradients with the frozen-weight term": gradients * (frozen > 0)}
        device = held | max(forward, backward, step, key=total)

        checkpoint = (w * (1 + held_out) + moments + FP32 * options.master_weights) * self.learned + frozen
        a_step = options.per_device_train_batch_size * options.gradient_accumulation_steps * devices
        samples = self.args.data.num_samples
        text, stored = TOKEN_BYTES * samples * self.window, samples * self.window > TOKENS_IN_MEMORY
        steps = options.max_steps if options.max_steps > 0 else samples * options.num_train_epochs / a_step
        saves = options.save_minutes != 0 and (options.save_steps or 0) < steps
        host = {
            "process": PROCESS,
            "W0": f * self.weights * mine * (keep == "cpu"),
            "text": text * (not stored),
            "checkpoint file": 2 * min(checkpoint * mine, FILE_BYTES) * saves,
        }
        saving = {
            "masks": 2 * masks,  # learned and magnitude
            "model for saving": f * self.weights,
            "masks of all devices": self.prunable * several,
        }
        disk = {
            "text": text * stored,
            "checkpoints": (options.save_total_limit + 1) * checkpoint * saves,
            "model and masks": f * self.weights + self.prunable // 8,
        }
        if self.on_gpu:
            places = {"device": device | {"CUDA context (assumed)": CUDA_CONTEXT}, "host": host | saving, "disk": disk}
        else:  # saving needs less than learning
            places = {"host": host | device | {"W0": host["W0"] + held["W0"]}, "disk": disk}
        return {place: {what: int(size) for what, size in items.items() if size} for place, items in places.items()}


def total(items: Items) -> float:
    return sum(items.values())


def numel(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def meta_model(name: str) -> tuple[nn.Module, torch.dtype]:
    """The model on the meta device, and the dtype of its files."""
    source, gguf_file = locate(name)
    options = {"gguf_file": gguf_file} if gguf_file else {}
    with one_line(f"--plan: no config of model {name!r}", "give a folder with config.json"):
        config = import_transformers().AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
        refuse_quantized(config.to_dict(), name)
        with torch.device("meta"):
            model = unfold_linears_(auto_class(config).from_config(config, trust_remote_code=False))
    return model, torch.float32 if gguf_file else getattr(config, "dtype", None) or torch.float32


def page(args: RunArgs) -> str:
    """What --plan prints. Raises InputError if the model has no config, or is refused by `prunable_layers`."""
    plan, rows = Plan(args), []
    one, eight = plan.memory(1), plan.memory(8)
    for place in one:
        pair = one[place], eight[place]
        for what in dict.fromkeys([*one[place], *eight[place]]):
            rows.append((place, what, *(f"{items.get(what, 0) / GB:.2f}" for items in pair)))
        rows.append((place, "total", *(f"{total(items) / GB:.2f}" for items in pair)))
    names = [str(dtype).removeprefix("torch.") for dtype in (plan.dtype, plan.autocast) if dtype]
    return (
        f"{args.model.model}: {plan.weights / 1e9:.3g} billion weights in {len(plan.blocks)} decoder blocks; "
        f"{len(plan.layers)} layers, {plan.prunable / plan.weights:.0%} of the weights, are pruned\n"
        f"{' weights, compute in '.join(names)}{' weights' * (len(names) == 1)}; "
        f"{plan.options.per_device_train_batch_size} x {plan.window} tokens per device and pass\n\n"
        f"{text_table(('GB of the', '', '1 device', 'each of 8'), rows)}\n"
    )


# ---------------------------------------------------------------------------------------------- before a run


def require_memory(args: RunArgs, device: torch.device, path: Path, devices: int = 1, local: int = 1) -> None:
    """Raises InputError, which says what to do, if the run needs more memory or disk than is free on this machine.

    Models that `Plan` does not know are not checked, and activations only of models like Llama.

    Args:
        path: the output directory; its files count as free space, because a resumed run replaces them.
        devices, local: processes of the run, and those of them on this machine.
    """
    try:
        plan, free = Plan(args), free_memory(device)
        sizes = needed(plan, devices, local)
        held = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        free["disk"] = disk_usage(path).free + held
    except Exception:  # an unusual config, a file that is being removed, or an error that loading reports
        return
    for place, size in sizes.items():
        if place in free and size > MARGIN * free[place]:
            listed = "" if "plan" in HIDDEN[args.command] else "; --plan lists what needs it"
            raise InputError(
                f"the run needs about {size / GB:.2f} GB on the {place}, where {free[place] / GB:.2f} GB are free; "
                f"{smaller(plan, devices, local, place, free[place])}{listed}"
            )


def needed(plan: Plan, devices: int, local: int) -> dict[str, float]:
    """Bytes on each device, on the host of `local` of the N processes, rank zero among them, and on the disk."""
    sizes = {}
    for place, items in plan.memory(devices).items():
        known = items if plan.knows_activations else items | {"activations": 0}
        once = sum(known.get(name, 0) for name in OF_RANK_ZERO)
        sizes[place] = once + (total(known) - once) * (local if place == "host" else 1)
    return sizes


def smaller(plan: Plan, devices: int, local: int, place: str, free: float) -> str:
    """What to do so that the run fits."""
    if place == "disk":
        remedy = "free some space, or choose another --output_dir"
        if "checkpoints" in plan.memory(devices)[place]:
            remedy += "; or give --save_minutes 0 (no checkpoints)"
            remedy += ", or a lower --save_total_limit" if plan.options.save_total_limit > 1 else ""
        return remedy
    args, flags, changed = plan.args, [], copy.deepcopy(plan.args)
    for section, name, value in SMALLER:
        options = getattr(changed, section)
        if getattr(options, name) == value or name in HIDDEN[args.command]:  # not a flag of this command
            continue
        flags.append(f"--{name} {value}".removesuffix(" True"))
        setattr(options, name, value)
        size = needed(Plan(changed), devices, local)[place]
        if size <= free:
            return f"with {' '.join(flags)} it needs {size / GB:.2f} GB"
    least, ways = Plan(changed), [" ".join(flags)] if flags else []
    for several in (2, 4, 8, 16, 32, 64) if place == "device" and args.command != "prune" else ():
        size = needed(least, several, 1)[place]
        if several > devices and size <= free:
            ways.append(f"torchrun on {several} devices")
            return f"with {' and '.join(ways)} it needs {size / GB:.2f} GB on each"
    fewer = "fewer processes on this machine, or " if place == "host" and local > 1 else ""
    return f"use {fewer}a smaller model"
