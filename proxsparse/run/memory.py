"""`--plan`: the memory of a run, by formulas from the model's config and the flags; nothing is loaded."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from proxsparse.io.checkpoints import FILE_BYTES
from proxsparse.io.model_files import refuse_quantized
from proxsparse.io.text_table import text_table
from proxsparse.models.checks import fit_window
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.models.loading import auto_class, import_transformers, locate, one_line
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.run.args import RunArgs
from proxsparse.runtime.device import PRECISIONS, choose_precision
from proxsparse.training.distillation import KEPT_TOKENS

# From the config.json of the models of our recipes, which need a network or an account; all are stored in 2 bytes.
FIELDS = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size "
FIELDS = (FIELDS + "max_position_embeddings").split()
KNOWN = {  # Hub id -> model_type (a Mistral without a sliding window is a Llama), FIELDS
    "meta-llama/Llama-2-7b-hf": ("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "meta-llama/Llama-2-13b-hf": ("llama", 5120, 13824, 40, 40, 40, 32000, 4096),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "mistralai/Mistral-7B-v0.1": ("mistral", 4096, 14336, 32, 32, 8, 32000, 32768),
    "mistralai/Mistral-7B-v0.3": ("llama", 4096, 14336, 32, 32, 8, 32768, 32768),
    "openlm-research/open_llama_7b_v2": ("llama", 4096, 11008, 32, 32, 32, 32000, 2048),
    "Qwen/Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072),
}
GB, FP32, BF16 = 10**9, 4, 2
TOKEN_BYTES = 24  # per calibration token: id, label, attention mask, int64
TEACHER_BYTES = KEPT_TOKENS * (4 + 2)  # per calibration token: int32 tokens, bfloat16 probabilities
PROCESS = 560 * 10**6  # libraries and tokenizer: VmHWM of a run on a model of 100 KB, torch 2.13 for CPUs, x86-64
CUDA_CONTEXT = 500 * 10**6  # with the workspaces of the libraries: assumed, not measured
MAPPED = 2**25  # glibc returns a freed tensor to the system if it has this size (mallopt(3), M_MMAP_THRESHOLD)
FREED = "freed, kept by malloc"

Items = dict[str, int]  # what -> bytes


def memory(args: RunArgs, devices: int = 1) -> dict[str, Items]:
    """The peak memory of one of N devices, of its process on the host (rank zero), and of the disk.

    Returns:
        device (if it is not the CPU), host, disk -> item -> bytes, at the moment of the run when this place is fullest.
    """
    return Plan(args).memory(devices)


class Plan:
    """The sizes of a model and a run, and the formulas; see `memory`."""

    def __init__(self, args: RunArgs):
        model, self.file_dtype, self.mapped = meta_model(args.model.model)
        layers = prunable_layers(model, args.model.pattern or "2:4", args.model.include, args.model.exclude)
        self.args, self.finetune = args, args.command == "finetune"
        options, hardware = args.options, args.hardware
        self.tokens = fit_window(model, args.data.seq_len, args.data.window, "seq_len")
        self.window = 0  # of the perplexity
        if args.evaluate.eval_data != "none":
            self.window = fit_window(model, args.evaluate.eval_seq_len, args.evaluate.window, "eval_seq_len")
        self.on_gpu = hardware.device.startswith("cuda") or (hardware.device == "auto" and torch.cuda.is_available())
        if hardware.precision == "auto" and self.on_gpu:  # the GPU may be in another machine
            self.dtype, self.autocast = PRECISIONS["mixed"]
        else:
            self.dtype, self.autocast = choose_precision(hardware.precision, torch.device("cpu"))
        self.compute = (self.autocast or self.dtype).itemsize  # bytes of a number in products
        of = model.config.get_text_config()
        self.hidden, self.heads = of.hidden_size, of.num_attention_heads
        self.key_heads = getattr(of, "num_key_value_heads", None) or self.heads
        self.head_dim = getattr(of, "head_dim", None) or self.hidden // self.heads
        width = getattr(of, "moe_intermediate_size", None) or getattr(of, "intermediate_size", None) or 4 * self.hidden
        self.intermediate = width * (getattr(of, "num_experts_per_tok", None) or 1)  # of the experts of a token
        padded = options.per_device_train_batch_size > 1 and not args.data.packing
        self.attention_mask = padded or self.tokens >= (getattr(of, "sliding_window", None) or math.inf)
        # numbers of weights
        self.matrices = numel(p for p in decoder_blocks(model)[0].parameters() if p.ndim > 1)  # of a block
        self.blocks = [numel(block.parameters()) for block in decoder_blocks(model)]
        self.weights, self.layers = numel(model.parameters()), [layer.weight.numel() for layer in layers.values()]
        self.prunable, vectors = sum(self.layers), numel(p for p in model.parameters() if p.ndim == 1)
        counts = {"prunable": self.prunable, "all": self.weights, "kept": self.prunable + vectors, "norms": vectors}
        self.learns = options.train if self.finetune else "prunable" if options.masked else "all"
        self.learned, head = counts[self.learns], model.get_output_embeddings().weight
        self.head, self.vocabulary = head.numel(), len(head)
        self.tied = self.head * (model.get_input_embeddings().weight is head)

    def block_bytes(self) -> int:
        """What a decoder block keeps for its backward pass: that of a Llama, exactly (tests/test_memory.py).

        Per token, w bytes per weight, c bytes in products: two norms keep their inputs and their scales in fp32, those
        that learn also two normalized inputs; the layers keep the two outputs of the norms, with autocast five copies;
        the attention keeps q, k, v, its output and a sum per head in fp32, and with a mask (padding, a sliding window)
        this mask, and k, v for every head; the MLP keeps gate, silu(gate), up and the product. With autocast each layer
        keeps a copy of its weight.
        """
        w, c, documents = self.dtype.itemsize, self.compute, self.args.options.per_device_train_batch_size
        key_heads = self.heads if self.attention_mask else self.key_heads
        norms = self.hidden * (2 * FP32 + (5 * c if self.autocast else 2 * w) + 2 * w * (self.learns != "prunable"))
        attention = 2 * c * self.head_dim * (self.heads + key_heads) + FP32 * self.heads
        mlp = 4 * c * self.intermediate
        a_token = norms + 2 * FP32 + attention + mlp + self.attention_mask * c * self.tokens
        return documents * self.tokens * a_token + (c * self.matrices if self.autocast else 0)

    def stages(self, devices: int) -> dict[str, tuple[Items, Items, Items]]:
        """The stages of the run in which a place can be fullest -> items of the device, the host and the disk."""
        options, w, f, mine = self.args.options, self.dtype.itemsize, self.file_dtype.itemsize, 1 / devices
        num_samples = self.args.data.num_samples
        masked, all_learn, several = self.learns == "prunable", self.learns == "all", devices > 1
        kept_in = self.args.hardware.pretrained_weights or "cpu"
        moments = 2 * (BF16 if (options.moment_dtype or self.args.hardware.precision) == "bf16" else FP32)
        frozen = w * self.prunable * (not self.finetune and options.frozen_lambda > 0)
        held_out = self.finetune and (num_samples >= 8 if options.held_out is None else options.held_out > 0)
        model = {
            "weights": w * self.weights * mine,
            "W0": f * self.weights * mine * (kept_in == "device"),
            "masks": self.prunable * mine * self.finetune,
        }
        held = model | {
            "learned weights": w * self.prunable * mine * masked,
            "moments": moments * self.learned * mine,
            "master weights": FP32 * self.learned * mine * options.master_weights,
            "W0 of the frozen-weight term": frozen * mine,
            "best weights": w * self.learned * mine * held_out,
        }
        calibration = num_samples * self.tokens
        host = {
            "process": PROCESS,
            "W0": f * self.weights * (mine if kept_in == "cpu" else kept_in == "disk" and not self.mapped),
            "text": TOKEN_BYTES * calibration,
            "teacher's outputs": TEACHER_BYTES * calibration * (options.distill > 0),
        }
        loaded = {"model as loaded": f * self.weights * (not self.mapped)}

        tokens = options.per_device_train_batch_size * self.tokens
        block = self.block_bytes()
        activations = len(self.blocks) * (w * tokens * self.hidden if options.gradient_checkpointing else block)
        if not self.finetune and options.match_hidden:  # the states of the dense model, and their differences
            activations += (w + FP32) * tokens * self.hidden * (len(self.blocks) - 1)
        of_a_block = block + tokens * (2 * self.compute * self.intermediate + 3 * FP32 * self.hidden)  # and gradients
        # in fp32: log p; its gradients from the text and, with distillation, the teacher; that of the logits; and with
        # autocast a copy of the output layer
        loss = FP32 * (3 + (options.distill > 0)) * tokens * self.vocabulary
        loss += self.compute * self.head if self.autocast else 0
        forward = (2 * FP32 + self.compute * (self.compute < FP32)) * self.vocabulary  # logits, in fp32, log p
        gradients = w * (max(self.layers) if options.step_in_backward else self.learned * mine)
        # FSDP2 gathers a block while another computes, and sends the gradients of a unit from a copy. Everything
        # outside the blocks is one unit.
        outside = self.weights - sum(self.blocks)
        gathered = several * w * (2 * max(self.blocks) + outside)
        passes = {"gathered": gathered + several * 2 * w * (max(self.blocks) + outside * all_learn)}
        # what malloc keeps: tensors of other sizes do not fit into the memory of these
        freed = gradients * (not self.on_gpu and w * max(self.layers) < MAPPED)
        freed_after = freed + activations * (not self.on_gpu and self.compute * tokens * self.intermediate < MAPPED)

        checkpoint = (w * (1 + held_out) + moments + FP32 * options.master_weights) * self.learned + frozen
        a_step = options.per_device_train_batch_size * options.gradient_accumulation_steps * devices
        steps = options.max_steps if options.max_steps > 0 else num_samples * options.num_train_epochs / a_step
        saves = 0 < options.save_steps < steps
        files = {"checkpoint file": 2 * min(checkpoint * mine, FILE_BYTES) * saves}
        masks = {"masks": self.prunable * mine * (1 if self.finetune else 2)}  # of finetune; learned and magnitude
        saving = {
            "model for saving": f * self.weights * (self.on_gpu or several),
            "masks of all devices": self.prunable * several,
        }
        snapped = {} if several else {"weights": f * self.weights}  # in the dtype of the files
        result = {"model and masks": f * self.weights + self.prunable // 8}
        result["checkpoints"] = options.save_total_limit * checkpoint * saves
        on_disk = {"checkpoints": (options.save_total_limit + 1) * checkpoint * saves}
        before = {"gradients": gradients} if options.gradient_accumulation_steps > 1 else {FREED: freed}
        last = {"activations": of_a_block, "gradients": gradients + w * self.tied * all_learn}
        stages = {
            "loading": ({}, host | loaded, {}),
            "loss": (held | {"activations": activations, "logits": loss} | before | passes, host, {}),
            "first block": (held | last | passes, host, {}),
            "optimizer": (held | {"gradients": gradients}, host, {}),
            "checkpoint": (held | {FREED: freed_after}, host | files, on_disk),
            "scoring": (model | {"logits": self.window * forward, "gathered": gathered}, host | masks, {}),
            "saving": (model | snapped, host | masks | saving, result),
        }
        if self.finetune and options.distill:
            teacher = {"teacher": w * self.weights * mine, "gathered": gathered}
            stages["teacher"] = (model | teacher | {"logits": tokens * forward}, host | loaded, {})
        return stages

    def memory(self, devices: int) -> dict[str, Items]:
        """See the function `memory`."""
        on_device, on_host, on_disk = zip(*self.stages(devices).values(), strict=True)
        if self.on_gpu:
            found = {"device": max(on_device, key=total) | {"CUDA context (assumed)": CUDA_CONTEXT}}
            found["host"] = max(on_host, key=total)
        else:
            found = {"host": max(map(joined, on_device, on_host), key=total)}
        found["disk"] = max(on_disk, key=total)
        return {place: {what: int(size) for what, size in items.items() if size} for place, items in found.items()}


def joined(*places: Items) -> Items:
    """The items of several places, added."""
    return {what: sum(items.get(what, 0) for items in places) for what in dict.fromkeys(k for i in places for k in i)}


def total(items: Items) -> int:
    """The sum of the items."""
    return sum(items.values())


def numel(weights: Iterable[torch.Tensor]) -> int:
    """The number of weights."""
    return sum(weight.numel() for weight in weights)


def meta_model(name: str) -> tuple[nn.Module, torch.dtype, bool]:
    """The model on the meta device, the dtype of its files, and whether their weights can stay mapped into memory."""
    transformers = import_transformers()
    source, gguf_file = locate(name)
    options = {"gguf_file": gguf_file} if gguf_file else {}
    with one_line(f"--plan: no config of model {name!r}", "give a folder with config.json"):
        if name == source and name in KNOWN:
            model_type, *values = KNOWN[name]
            config = transformers.AutoConfig.for_model(model_type, **dict(zip(FIELDS, values, strict=True)))
            config.dtype = torch.bfloat16
        else:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
        refuse_quantized(config.to_dict(), name)
        with torch.device("meta"):
            model = unfold_linears_(auto_class(config).from_config(config, trust_remote_code=False))
    dtype = torch.float32 if gguf_file else getattr(config, "dtype", None) or torch.float32
    return model, dtype, not gguf_file


def page(args: RunArgs) -> str:
    """What --plan prints. Raises InputError as `memory`."""
    plan = Plan(args)
    one, eight = plan.memory(1), plan.memory(8)
    rows = []
    for place in one:
        items = joined(one[place], eight[place])
        rows += [(place, what, *(f"{plan_[place].get(what, 0) / GB:.2f}" for plan_ in (one, eight))) for what in items]
        rows.append((place, "total", *(f"{total(plan_[place]) / GB:.2f}" for plan_ in (one, eight))))
    names = [str(dtype).removeprefix("torch.") for dtype in (plan.dtype, plan.autocast) if dtype]
    return (
        f"{args.model.model}: {plan.weights / 1e9:.3g} billion weights in {len(plan.blocks)} decoder blocks; "
        f"{len(plan.layers)} layers, {plan.prunable / plan.weights:.0%} of the weights, are pruned\n"
        f"{' weights, compute in '.join(names)}{' weights' * (len(names) == 1)}; "
        f"{args.options.per_device_train_batch_size} x {plan.tokens} tokens per device and pass\n\n"
        f"{text_table(('GB of the', '', '1 device', 'each of 8'), rows)}\n"
    )
