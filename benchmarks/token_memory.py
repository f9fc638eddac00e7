"""Peak memory of the host while `proxsparse train` reads and learns from more and more text, per calibration token.

    OMP_NUM_THREADS=1 python benchmarks/token_memory.py                    # 0.25, 2 and 20 million tokens; 3 minutes
    OMP_NUM_THREADS=1 python benchmarks/token_memory.py --processes 2      # each of two processes
    OMP_NUM_THREADS=1 python benchmarks/token_memory.py --documents 1200000 --tokens 32    # over a million documents

A tiny model with a vocabulary of 49,152, --distill 0.5, four steps. Measured is the anonymous memory (RssAnon), without
the files that are mapped into memory, of the process that needs most; it is read every 20 ms, so Linux only.
"""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from lib import common
from tiny_models import save, tiny_model

LEARN = ["--max_steps", "4", "--distill", "0.5", "--scaling_samples", "8", "--eval_data", "none", "--device", "cpu"]


def main(arguments: list[str] | None = None) -> int:
    parser = common.new_parser(__doc__)
    documents = [500, 4000, 40000]
    parser.add_argument("--documents", type=int, nargs="+", default=documents, metavar="N", help="to learn from")
    parser.add_argument("--tokens", type=int, default=512, help="of a document; a byte is a token")
    parser.add_argument("--processes", type=int, default=1, help="started by torchrun")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args(arguments)
    results = common.Results("token_memory", torch.device("cpu"), not args.no_save, arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("llama", vocab_size=49152, max_position_embeddings=args.tokens)
        save(model, Path(folder, "model"))
        for documents in args.documents:
            text = Path(folder, f"{documents}.jsonl")
            with text.open("w") as file:
                for number in range(documents):
                    file.write(json.dumps((f"{number} " * args.tokens)[: args.tokens]) + "\n")
            paths = ["--model", f"{folder}/model", "--data", str(text), "--output_dir", f"{folder}/run-{documents}"]
            start = ["-m", "torch.distributed.run", "--nproc_per_node", str(args.processes)]
            command = [sys.executable, *(start if args.processes > 1 else ()), "-m", "proxsparse.train", *LEARN]
            start_s, size = time.monotonic(), ["--num_samples", str(documents), "--seq_len", str(args.tokens)]
            row = {"tokens": documents * args.tokens, "documents": documents, "processes": args.processes}
            row |= {"peak": peak([*command, *paths, *size]), "seconds": time.monotonic() - start_s}
            print(*results.add([row]), flush=True)
    results.show({"tokens": "{tokens:,}", "processes": "{processes}", "peak bytes": "{peak:,}"})
    return 0


def peak(command: list[str]) -> int:
    """Runs a command to its end. Returns the largest anonymous memory in bytes of it or one of its children."""
    process, size = subprocess.Popen(command), 0
    while process.poll() is None:
        with suppress(OSError):  # a process has just ended
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for number in (process.pid, *children):
                status = Path(f"/proc/{number}/status").read_text().splitlines()
                size = max(size, *(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon")), 0)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    return size


if __name__ == "__main__":
    sys.exit(main())
