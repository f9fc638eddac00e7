"""The Python front door: `prune_`, `finetune_` and `perplexity` on a model in memory.

The commands `proxsparse prune`, `train`, `finetune` and `evaluate` read the same data and run the same methods and
measurements; keyword arguments have the names of their flags.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse.allocations.registry import UNIFORM, allocate, get_allocation
from proxsparse.data.batches import read_batches, read_tokens
from proxsparse.data.calibration import arrays_of
from proxsparse.errors import InputError, require_path
from proxsparse.evaluation.perplexity import perplexity as measure
from proxsparse.io.checkpoints import CHECKPOINTS, TOKENS, Checkpoints, digest_of
from proxsparse.methods import get_method
from proxsparse.methods.finetune import train_kept_weights
from proxsparse.methods.pruned import Pruned
from proxsparse.methods.registry import check_option_names
from proxsparse.models.checks import refuse_not_finite, refuse_wrapped, require_changeable, uncompiled
from proxsparse.models.layers import (
    UNSPARSIFY,
    body_linears,
    is_selected,
    prunable_layers,
    pruned_layers,
    refuse_packed,
)
from proxsparse.models.loading import refuse_not_causal
from proxsparse.models.snap import copy_weights, snap_
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.patterns import NMPattern, PatternLike, pattern_of_zeros
from proxsparse.run.args import DataArgs, EvaluateArgs, HardwareArgs, TuningDataArgs
from proxsparse.run.teacher import identity_of, refuse_other_vocabulary
from proxsparse.runtime.distributed import world_size
from proxsparse.runtime.progress import shown
from proxsparse.training.options import FinetuneOptions, check_fields

# values of the type of each argument
TYPICAL = {"num_samples": 400, "seq_len": 512, "packing": False, "text_field": "text", "seed": 42, "max_windows": -1}
TYPICAL |= {"save_steps": 1, "learning_rate": 3e-4}
# What these functions have instead of a flag with another name
IN_PYTHON = {"--precision fp32": "model.float()", "--output_dir": "checkpoints"}


def prune_(
    model: nn.Module,
    method: str = "proxsparse",
    data: str | Iterable | None = None,
    tokenizer=None,
    *,
    pattern: PatternLike | dict[str, PatternLike] = "2:4",
    allocation: str = UNIFORM,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    num_samples: int = 400,
    seq_len: int | None = None,
    packing: bool = False,
    text_field: str = "text",
    seed: int = 42,
    checkpoints: str | Path | None = None,
    **options,
) -> dict[str, Tensor]:
    """Prunes the linear layers of a causal language model in place; pruned weights become +0.0.

        masks = proxsparse.prune_(model, "proxsparse", "c4", tokenizer, num_samples=400, seq_len=512)
        model.save_pretrained("pruned")

    The kept weights stay bit-identical, except with methods that update them (sparsegpt, admm). A progress bar is shown
    on an interactive terminal and in a notebook.

    If an error or Ctrl-C ends the call, the model is as before; this needs a copy of the weights (on the CPU, except
    with proxsparse). Only Ctrl-C during mask learning (proxsparse) first prunes the model with the masks learned so
    far, so it is valid N:M. In any case Conv1D modules (GPT-2) and fused experts become nn.Linear layers, which
    `save_pretrained` writes as before: create optimizers and hooks after this call.

    Args:
        model: a decoder-only model of transformers, on its device, in float64, float32, bfloat16 or float16. bfloat16
            weights are learned with stochastic rounding.
        method: magnitude, wanda, sparsegpt, admm, swap, maskllm or proxsparse (which learns the masks).
        data: calibration text, not needed for magnitude: the name of a source ("c4", "wikitext2", "builtin", a data set
            of the Hub, a file); texts, or dicts with a text, such as a Dataset; token tensors int64 [T] or [B, T], or
            dicts with input_ids, in a list or a DataLoader. Samples without a token to predict are left out.
        tokenizer: that of the model; needed if the data is text.
        pattern: "N:M": N of every M consecutive weights of a row are kept; or layer name -> pattern.
        allocation: uniform: `pattern` for all layers; sensitivity: one of 2:4, 4:6, 6:8, 8:10 or dense for each
            layer, so that the loss is small at the share of the arithmetic that `target_flops` gives.
        include: regular expressions; only layers whose name matches one are pruned.
        exclude: regular expressions; layers whose name matches one stay dense.
        num_samples: number of calibration samples.
        seq_len: largest number of tokens in a sample; default: 512, or the context length of the model if shorter.
            Tokens and dicts are cut only if it is given.
        packing: join documents into full windows; without it a sample is one truncated document.
        text_field: the field of a row that holds the text.
        seed: seed of the document order and of all random numbers.
        checkpoints: a directory where the progress is saved; the same call, on the same weights, resumes from it.
        options: options of the method and the allocation, such as damping=0.1; `proxsparse prune --method NAME --help`
            describes them.
    Returns:
        Layer name -> bool [out_features, in_features] on the CPU, True = kept; in model order.
    Raises:
        InputError: a ValueError whose message names the argument: an unknown method or option, a value out of range,
            data of another form, no layer to prune, weights that are NaN.
    """
    with front_door(model) as model:
        require_path("checkpoints", "" if checkpoints is None else checkpoints)
        chosen, allocated = get_method(method), get_allocation(allocation)
        known = chosen.options | allocated.options
        what = f"method {method!r}" + f" with allocation {allocation!r}" * (allocation != UNIFORM)
        check_option_names(options, known, what)
        given = {"num_samples": num_samples, "seq_len": seq_len, "packing": packing, "text_field": text_field}
        more = {"seed": seed, "include": include, "exclude": exclude}
        check_types(options | given | {"seed": seed}, known | TYPICAL)
        check_fields(DataArgs(**given))
        check_fields(HardwareArgs(seed=seed))
        values = known | options | {"seed": seed}
        of_method = {name: values[name] for name in chosen.options}
        of_allocation = {name: values[name] for name in allocated.options}
        chosen.check(**of_method)
        allocated.check(**of_allocation)
        check_model(model)
        torch.manual_seed(seed)  # for dropout
        layers = prunable_layers(unfold_linears_(model), pattern, include, exclude)
        one_each = pattern if isinstance(pattern, dict) else dict.fromkeys(layers, pattern)
        patterns = {name: NMPattern.parse(one_each[name]) for name in layers}
        batches = []
        if chosen.needs_data or allocated.needs_data:
            if data is None:
                raise InputError(f"data=None: method {method!r} needs calibration text, such as data='c4'")
            given |= {"batch_size": options.get("per_device_train_batch_size", 1), "seed": seed}
            batches, _ = read_batches(data, model, tokenizer, folder=tokens_folder(checkpoints), **given)
        identity = {"method": method, "pattern": str(pattern), "allocation": allocation} | more | values
        saved = saved_progress(checkpoints, identity, model, batches)
        if allocation != UNIFORM:
            patterns = allocate(allocation, model, layers, batches, pattern, saved, **of_allocation)
            layers = {name: layers[name] for name in patterns}
        prune = partial(chosen.prune, model, layers, batches, patterns, **of_method)
        return prune_or_restore_(prune, chosen.takes, model, saved)


def finetune_(
    model: nn.Module,
    teacher: nn.Module | None,
    data: str | Iterable,
    tokenizer=None,
    *,
    pattern: PatternLike | None = None,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    num_samples: int = 400,
    seq_len: int | None = None,
    packing: bool = True,
    text_field: str = "text",
    seed: int = 42,
    checkpoints: str | Path | None = None,
    **options,
) -> dict[str, Tensor]:
    """Trains the kept weights of an N:M model in place; the pruned weights stay +0.0.

        proxsparse.finetune_(model, dense_model, "c4", tokenizer, num_samples=400, seq_len=512)

    The masks are found from the zeros. If an error ends the call, the model is as before; Ctrl-C during the training
    keeps the weights so far, which are valid N:M.

    Args:
        model: the pruned model.
        teacher: the dense model with weights of its own, evaluated in every step; None: only the text is learned.
        data, tokenizer: as in `prune_`.
        pattern: N:M of the pruned layers; None: that of each layer is found from its zeros, in blocks of 4, 6, 8, 10 or
            16. The weights of layers without a pattern stay as they are. All norms, biases and other vectors of the
            model, such as A_log of Mamba, are trained.
        include, exclude, num_samples, text_field, seed, checkpoints: as in `prune_`.
        seq_len: number of tokens in a sample; default: 1024, with packing=False 512, or the context length of the model
            if shorter.
        packing: join documents into full windows; False: a sample is one truncated document, which was better after
            sparsegpt and admm.
        options: flags of `proxsparse finetune`, such as learning_rate=3e-4, distill=0.5, held_out=16.
    Returns:
        Layer name -> bool [out_features, in_features] on the CPU, True = kept.
    Raises:
        InputError: a ValueError whose message names the argument: no layer is N:M, the teacher has other tokens, an
            option is unknown or out of range.
    """
    with front_door(model) as model:
        teacher = uncompiled(teacher, "teacher")
        require_path("checkpoints", "" if checkpoints is None else checkpoints)
        known = vars(FinetuneOptions())
        if teacher is None:
            options = {"distill": 0.0} | options
        check_option_names(options, known, "finetune_")
        given = {"num_samples": num_samples, "seq_len": seq_len, "packing": packing, "text_field": text_field}
        more = {"seed": seed, "include": include, "exclude": exclude}
        check_types(options | given | {"seed": seed}, known | TYPICAL)
        data_args = TuningDataArgs(**given)
        check_fields(data_args)
        values = vars(FinetuneOptions(**options, seed=seed).check())
        check_model(model)
        torch.manual_seed(seed)  # for dropout
        patterns = patterns_of_zeros(unfold_linears_(model), pattern, include, exclude)
        layers = prunable_layers(model, patterns) if patterns else {}
        if not layers:
            remedy = "prune it first, or give its pattern"
            raise InputError(f"model: no layer is {'pruned' if pattern is None else pattern}; {remedy}")
        if values["distill"]:
            if teacher is None:
                raise InputError(f"teacher=None: distill={values['distill']:g} needs the dense model")
            check_language_model(teacher, "teacher")
            if {*map(id, model.parameters())} & {*map(id, teacher.parameters())}:
                raise InputError("teacher: shares weights with the model, which change; load the dense model again")
            refuse_other_vocabulary(model, teacher, "teacher")
        given |= {"window": data_args.window, "batch_size": values["per_device_train_batch_size"], "seed": seed}
        batches, _ = read_batches(data, model, tokenizer, folder=tokens_folder(checkpoints), **given)
        identity = {"method": "finetune", "pattern": {name: str(each) for name, each in patterns.items()}}
        identity |= more | values | (identity_of(teacher) if values["distill"] else {})
        saved = saved_progress(checkpoints, identity, model, batches)
        train = partial(train_kept_weights, model, layers, batches, patterns, teacher=teacher, **values)
        return prune_or_restore_(train, ("checkpoints",), model, saved)


def perplexity(
    model: nn.Module,
    tokenizer,
    data: str | Iterable = "wikitext2",
    *,
    seq_len: int | None = None,
    max_windows: int = -1,
    split: str | None = None,
    text_field: str = "text",
    bos: str | None = None,
) -> float:
    """exp of the mean negative log-likelihood of a text, in windows that do not overlap, as pruning papers measure it.

    Args:
        data: the name of a source ("wikitext2": its test text), or texts or tokens in any form of `prune_`; they are
            joined to one text.
        seq_len: tokens in a window; default: 2048, or the context length of the model or the text if shorter.
        max_windows: largest number of windows; -1: all.
        split: split of a data set; default: "validation", of wikitext2 "test".
        text_field: the field of a row that holds the text.
        bos: where the bos token stands, "first" or "each" window; default: "each" for Gemma models, else "first".
    Raises:
        InputError: a ValueError whose message names the argument.
    """
    with front_door(model) as model:
        check_language_model(model)
        check_types({"seq_len": seq_len, "max_windows": max_windows}, TYPICAL)
        check_fields(EvaluateArgs(eval_seq_len=seq_len, eval_max_windows=max_windows, eval_bos=bos))
        tokens = read_tokens(data, model, tokenizer, split, text_field)
        return measure(model, tokenizer, tokens, seq_len, max_windows, bos).value


# ---------------------------------------------------------------------------------------------- parts


def patterns_of_zeros(
    model: nn.Module, pattern: PatternLike | None, include: list[str] | None, exclude: list[str] | None
) -> dict[str, NMPattern]:
    """Layer name -> pattern of the pruned layers; `pattern` None: that of its zeros."""
    if pattern is not None:
        pattern = NMPattern.parse(pattern)
        return dict.fromkeys(pruned_layers(prunable_layers(model, pattern, include, exclude), pattern), pattern)
    selected = {name: layer for name, layer in body_linears(model).items() if is_selected(name, include, exclude)}
    found = {name: pattern_of_zeros(name, layer.weight) for name, layer in selected.items()}
    return {name: each for name, each in found.items() if each is not None}


def prune_or_restore_(
    prune: Callable[..., Pruned], takes: tuple[str, ...], model: nn.Module, checkpoints: Checkpoints | None
) -> dict[str, Tensor]:
    """The masks of `Method.prune`; restores the weights if it fails. Ctrl-C in a training is raised after its end.

    `prune`: with all arguments except `checkpoints` and `pretrained`, of which it takes those in `takes`.
    """
    if "pretrained" in takes:  # used in every step
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    else:
        before = copy_weights(model)
    learns = {name: weight.requires_grad for name, weight in model.named_parameters()}
    given = {"checkpoints": checkpoints, "pretrained": before}
    model.zero_grad()  # gradients of the caller
    try:
        pruned = prune(**{name: given[name] for name in takes})
    except BaseException:
        snap_(model, before, {})
        raise
    finally:
        model.zero_grad()
        for name, weight in model.named_parameters():
            weight.requires_grad_(learns[name])
    if "pretrained" in takes:
        snap_(model, before, pruned.masks)
    pruned.stop.restore()
    if pruned.stop.seen is not None:
        raise KeyboardInterrupt
    return pruned.masks


def saved_progress(
    folder: str | Path | None, identity: dict, model: nn.Module, batches: list[dict[str, Tensor]]
) -> Checkpoints | None:
    """The checkpoints in a directory, which is created; None without one."""
    if folder is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"checkpoints={str(folder)!r}: cannot be created ({error.strerror}); give a folder") from error
    identity = {name: list(value) if isinstance(value, tuple) else value for name, value in identity.items()}  # as JSON
    return Checkpoints(Path(folder), identity | {"digest": digest_of(model, arrays_of(batches))})


def tokens_folder(checkpoints: str | Path | None) -> Path | None:
    """Where many tokens are stored: next to the checkpoints."""
    return None if checkpoints is None else Path(checkpoints) / CHECKPOINTS / TOKENS


def check_model(model: nn.Module) -> None:
    """Raises InputError unless it is a dense, causal language model of transformers with finite weights."""
    if world_size() > 1:
        remedy = "start proxsparse train or finetune with torchrun instead"
        raise InputError(f"this function runs in one process, not in a process group of {world_size()}; {remedy}")
    check_language_model(model)
    require_changeable(model)
    refuse_packed(model, UNSPARSIFY)
    refuse_not_finite(model)


def check_language_model(model: nn.Module, what: str = "model") -> None:
    """Raises InputError, which begins with `what`, unless it is a causal language model whose outputs have names."""
    refuse_wrapped(model, what)
    config = getattr(model, "config", None)
    if config is None or getattr(model, "get_output_embeddings", lambda: None)() is None:
        reason = f"{type(model).__name__} is not a causal language model of transformers"
        raise InputError(f"{what}: {reason}; load it with AutoModelForCausalLM")
    refuse_not_causal(model, what)
    if False in (getattr(part, "return_dict", True) for part in (config, config.get_text_config())):
        remedy = f"set return_dict = True in {what}.config, and in its text_config if there is one"
        raise InputError(f"{what}: returns tuples (return_dict is false); {remedy}")


def check_types(options: dict, known: dict) -> None:
    """Raises InputError for an option whose value has another type than its default, such as "0.1" for 0.1."""
    for name, value in options.items():
        default = known[name]
        kinds = (int, float) if isinstance(default, float) else type(default)
        if default is None or value is None:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise InputError(f"{name}={value!r}: must be of type {type(default).__name__}")


@contextmanager
def front_door(model: nn.Module) -> Iterator[nn.Module]:
    """The context of a call, with the `uncompiled` model. It shows progress if somebody watches, and restores torch's
    random number generators.

    An InputError names arguments instead of flags: "--seq_len 1: ..." becomes "seq_len 1: ...", and see `IN_PYTHON`.
    """
    interactive = sys.stderr.isatty() or "ipykernel" in sys.modules  # a terminal or a notebook
    weights = model.parameters() if isinstance(model, nn.Module) else ()
    devices = {weight.device.index for weight in weights if weight.is_cuda}
    try:
        with shown(interactive), torch.random.fork_rng(devices):
            yield uncompiled(model)
    except InputError as error:
        text = str(error)
        for flag, argument in IN_PYTHON.items():
            text = text.replace(flag, argument)
        raise InputError(re.sub(r"--(?:eval_)?(\w+)", r"\1", text)) from error.__cause__
