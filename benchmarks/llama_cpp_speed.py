"""Decoding speed of llama.cpp on the CPU, for a model of the shape that generate_speed.py measures.

    pip install llama-cpp-python gguf        # in an environment of its own: it is compiled for this CPU
    python benchmarks/llama_cpp_speed.py --threads 2
    python benchmarks/llama_cpp_speed.py --blocks 4 --types Q8_0 Q4_0 BF16

Dense random weights, four decoder blocks of Mistral-7B by default; embeddings and output layer are BF16 in every type,
as they are in our packed models. A prompt of 32 tokens, then 16 tokens one by one. Needs none of our packages. Appends
rows to results/llama_cpp_speed.jsonl.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import gguf
import llama_cpp
import numpy

RESULTS = Path(__file__).parent / "results" / "llama_cpp_speed.jsonl"
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 8, 32000  # Mistral-7B
PROMPT, NEW_TOKENS = 32, 16
SILENT = llama_cpp.llama_log_callback(lambda *_arguments: None)


def main() -> None:
    """Measures each type and prints a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["BF16", "Q8_0", "Q4_0"], help="types of the weights in GGUF")
    parser.add_argument("--blocks", type=int, default=4, help="decoder blocks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5, help="rounds of decoding")
    args = parser.parse_args()
    llama_cpp.llama_log_set(SILENT, None)
    llama_cpp.llama_backend_init()
    for name in args.types:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            layer_bytes = write_model(path, args.blocks, getattr(gguf.GGMLQuantizationType, name))
            prompt_ms, step_ms = measure(path, args.threads, args.repetitions)
        row = {"program": f"llama-cpp-python {version('llama-cpp-python')}", "type": name, "blocks": args.blocks}
        row |= {"device": device(), "commit": commit()}
        row |= {"threads": args.threads, "layer_bytes": layer_bytes, "prefill_tokens_per_s": 1000 * PROMPT / prompt_ms}
        row |= {"decode_tokens_per_s": 1000 / step_ms, "step_ms": step_ms, "when": time.strftime("%Y-%m-%dT%H:%M:%S")}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: {row['decode_tokens_per_s']:.2f} tokens/s, prefill {row['prefill_tokens_per_s']:.1f} tokens/s")


def device() -> str:
    """The name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def commit() -> str:
    """The commit of this repository."""
    where = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()


def write_model(path: Path, blocks: int, kind: gguf.GGMLQuantizationType) -> int:
    """Writes a Llama with random weights; returns the bytes of the linear layers of its blocks."""
    writer, random = gguf.GGUFWriter(path, "llama"), numpy.random.default_rng(0)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(blocks)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
        weight = random.standard_normal(shape, dtype=numpy.float32) * 0.02 if len(shape) > 1 else numpy.ones(shape)
        stored = gguf.quants.quantize(weight.astype(numpy.float32), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        return stored.nbytes

    key_value, total = HIDDEN // HEADS * KV_HEADS, 0
    full, plain = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (key_value, HIDDEN), "attn_v": (key_value, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INTERMEDIATE, HIDDEN), "ffn_up": (INTERMEDIATE, HIDDEN)}
    shapes |= {"ffn_down": (HIDDEN, INTERMEDIATE)}
    add("token_embd.weight", (VOCABULARY, HIDDEN), full)
    for block in range(blocks):
        total += sum(add(f"blk.{block}.{name}.weight", shape, kind) for name, shape in shapes.items())
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{block}.{norm}.weight", (HIDDEN,), plain)
    add("output_norm.weight", (HIDDEN,), plain)
    add("output.weight", (VOCABULARY, HIDDEN), full)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def measure(path: Path, threads: int, repetitions: int) -> tuple[float, float]:
    """Milliseconds of a prompt, and of a decode step: medians."""
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 128, threads, threads
    context = llama_cpp.llama_init_from_model(model, params)
    prompts, steps = [], []

    def decode(tokens: list[int]) -> float:
        memory = (llama_cpp.llama_token * len(tokens))(*tokens)  # the batch only points to it
        batch = llama_cpp.llama_batch_get_one(memory, len(memory))
        start = time.perf_counter()
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(context)
        return 1000 * (time.perf_counter() - start)

    for _ in range(repetitions + 1):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        prompts.append(decode(list(range(5, 5 + PROMPT))))
        steps.append(statistics.mean(decode([100 + i]) for i in range(NEW_TOKENS)))
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return statistics.median(prompts[1:]), statistics.median(steps[1:])


if __name__ == "__main__":
    main()
