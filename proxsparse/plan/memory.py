"""The memory of a run on each of N devices, in bytes: a formula for every kind of tensor, except activations."""

from dataclasses import replace

import torch

from proxsparse.models.checks import fit_window
from proxsparse.plan.activations import count_passes
from proxsparse.plan.architecture import Shape
from proxsparse.run.config import EVAL_SEQ_LEN, TrainConfig
from proxsparse.runtime.device import PRECISIONS, choose_precision
from proxsparse.training.distillation import KEPT_TOKENS

Buckets = dict[str, int]  # what -> bytes

# The resident memory of a run on a model of 100 KB (530 MB, of which 206 MB are libraries), and SmolLM2's tokenizer.
# Measured with benchmarks/plan_check.py on Linux x86-64, torch 2.13 for CPUs, transformers 5.23.
PROCESS = 560 * 10**6
# Freed memory that malloc keeps between tensors: 5% to 15% of the tensors in plan_check.py's CPU runs, 0 where every
# tensor has its own mapping (MALLOC_MMAP_THRESHOLD_=65536).
FRAGMENTATION = 0.10
MAPPED = 2**25  # glibc gives tensors of this size their own mapping, and returns it when they are freed
FREED = "freed gradients"  # malloc keeps those of smaller tensors from step to step
CUDA_CONTEXT = 500 * 10**6  # with the workspaces of the libraries: assumed, not measured on a GPU
FP32 = 4
FUSED_PATTERNS = ("2:4", "1:4")  # those of the C++ and the Triton kernel of masked_weight_
REFERENCE_MASK_BYTES = 20  # per weight of a layer, scores in fp32 and their sort: measured, with W0 in the same dtype
TEXT_BYTES = 3 * 8  # per token: id, label, attention mask, int64
TEACHER_BYTES = KEPT_TOKENS * (4 + 2)  # per token: int32 tokens, bfloat16 probabilities


class Plan:
    """The memory of the run that the flags describe. Raises InputError as `Shape` and `count_passes` do."""

    def __init__(self, config: TrainConfig, shape: Shape | None = None):
        self.shape = shape or Shape(config)
        model = self.shape.two_blocks
        windows = {"seq_len": fit_window(model, config.seq_len, config.window, "seq_len")}
        if config.eval_data != "none":
            windows["eval_seq_len"] = fit_window(model, config.eval_seq_len, EVAL_SEQ_LEN, "eval_seq_len")
        self.config = config = replace(config, **windows)
        self.on_gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
        if config.precision == "auto" and self.on_gpu:  # the GPU may be on another machine
            self.dtypes = PRECISIONS["mixed"]
        else:
            self.dtypes = choose_precision(config.precision, torch.device("cpu"))
        self.weight_bytes = self.dtypes[0].itemsize
        self.moment_dtype = config.moment_dtype or ("bf16" if config.precision == "bf16" else "fp32")
        self.masked, self.all_learn = config.forward == "masked", config.update == "all"
        self.learned = self.shape.weights if self.all_learn else self.shape.prunable
        self.masks = 2 * self.shape.prunable  # learned and magnitude mask in host memory, one byte per weight each
        self.passes = count_passes(self.shape, config, self.dtypes)

    def with_flags(self, **flags) -> "Plan":
        """The plan for the same model with other values of these flags."""
        if "objective" in flags:  # which sets these three
            flags |= {"scaling": None, "forward": None, "update": None}
        config = replace(self.config, **flags)
        config.fill_in()
        return Plan(config, self.shape)

    def held(self) -> Buckets:
        """Tensors that exist from the first step to the last; each of N devices holds 1/N of them."""
        config, shape, weight = self.config, self.shape, self.weight_bytes
        return {
            "weights": weight * shape.weights,
            "learned weights": weight * shape.prunable * self.masked,
            "moments": 2 * (2 if self.moment_dtype == "bf16" else FP32) * self.learned,
            "masters": FP32 * self.learned * config.master_weights,
            "W0": shape.file_bytes * shape.weights * (config.pretrained_weights == "device"),
            "W0 for --frozen_lambda": weight * shape.prunable * (config.frozen_lambda > 0),
        }

    def new_mask_bytes(self) -> int:
        """Bytes per weight of the tensors that `LearnableLayer.remask_` makes, layer by layer.

        The kernels of `ops.masked_weight_` make none, but W0 may have to be copied from the host or converted before.
        """
        file = self.shape.file_dtype
        copied = self.on_gpu and self.config.pretrained_weights != "device"
        converted = file != self.dtypes[0] and (file, self.dtypes[0]) != (torch.bfloat16, torch.float32)
        tensors = 0 if self.config.pattern in FUSED_PATTERNS else REFERENCE_MASK_BYTES
        return tensors + file.itemsize * copied + self.weight_bytes * converted

    def phases(self, devices: int) -> dict[str, Buckets]:
        """The memory of one of N devices in each phase that can be the peak.

        During a backward pass gradients grow and activations shrink by the same amount in every decoder block, so the
        peak is at its beginning or at its end.
        """
        config, shape, weight = self.config, self.shape, self.weight_bytes
        held = {name: size // devices for name, size in self.held().items()}
        kept = (shape.blocks - 2) * self.passes.kept
        gradients = 0 if config.step_in_backward else weight * self.learned // devices
        # FSDP2 gathers the next block while one computes. It keeps the gradients of one unit and the buffer for sending
        # them; everything outside the blocks is one unit.
        gathered = (devices > 1) * weight * (2 * shape.block + shape.outside)
        sent = (devices > 1) * 2 * weight * (shape.block + shape.outside * self.all_learn)
        new_mask = self.new_mask_bytes() * shape.largest_layer // devices * self.masked
        masks = 0 if self.on_gpu else self.masks // devices
        first = {"activations": self.passes.loss + kept, "gathered": gathered + sent}
        if config.match_hidden:  # those of the dense model, and their differences
            documents, width = config.per_device_train_batch_size, shape.two_blocks.config.get_text_config().hidden_size
            first["hidden states"] = 2 * FP32 * documents * config.seq_len * width * (shape.blocks - 1)
        last = {"activations": self.passes.first_block, "gathered": gathered + sent, "gradients": gradients}
        step = {"gradients": gradients, "new mask of one layer": new_mask}
        perplexity = {"activations": self.passes.perplexity, "gathered": gathered, "masks": masks}
        if config.gradient_accumulation_steps > 1:
            first["gradients"] = gradients
        elif not self.on_gpu and weight * shape.largest_layer < MAPPED:
            # the gradients of the previous step, whose memory the activations of the decoder blocks reuse
            first[FREED] = max(0, min(gradients, weight * shape.prunable // devices) - kept)
        return {
            "the loss and the backward pass of the last decoder blocks": held | first,
            "the backward pass of the first decoder block": held | last,
            "the optimizer step": held | step,
            "the perplexity": held | perplexity,
        }

    def on_device(self, devices: int) -> tuple[str, Buckets]:
        """The phase in which one of N devices has its peak, and its memory in that phase."""
        phase, buckets = max(self.phases(devices).items(), key=lambda item: sum(item[1].values()))
        if self.on_gpu:
            buckets["CUDA context (assumed)"] = CUDA_CONTEXT
        else:
            buckets["heap fragmentation"] = int(FRAGMENTATION * sum(buckets.values()))
        return phase, {name: size for name, size in buckets.items() if size}

    def device_bytes(self, devices: int) -> int:
        """The peak memory of one of N devices."""
        return sum(self.on_device(devices)[1].values())

    def on_host(self, devices: int) -> Buckets:
        """Host memory of the process of one of N devices."""
        config, shape = self.config, self.shape
        tokens = config.num_samples * config.seq_len
        w0 = config.pretrained_weights == "cpu" or (config.pretrained_weights == "disk" and not shape.mapped)
        buckets = {
            "process": PROCESS,
            "W0": shape.file_bytes * shape.weights // devices * w0,
            "masks, at the end": self.masks // devices * self.on_gpu,  # on a CPU they are in their phase
            "calibration text": TEXT_BYTES * tokens,
            "teacher": TEACHER_BYTES * tokens * (config.distill > 0),
        }
        return {name: size for name, size in buckets.items() if size}
