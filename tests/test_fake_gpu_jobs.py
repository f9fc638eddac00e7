"""Pruning, packing, generation and whole commands on the fake GPU: each gives there what it gives on the CPU."""

import json

import pytest
import torch
from fake_gpu import fake_gpu, is_on_gpu
from pruned import pruned_linear, pruned_model
from tiny_models import byte_tokenizer, save_texts, save_tiny_model, tiny_model

from proxsparse import env, evaluate, prune, train
from proxsparse.allocations.registry import allocate, list_allocations
from proxsparse.evaluation import zero_shot as module
from proxsparse.inference.convert import sparsify_, unsparsify_
from proxsparse.inference.linear import SparseLinear
from proxsparse.methods import list_methods, prune_
from proxsparse.models.layers import prunable_layers
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.ops import pack_nm, unpack_nm
from proxsparse.ops.choice import choose
from proxsparse.ops.registry import get_kernel, list_backends

# the method's own options that make it short
OPTIONS = {"admm": {"iterations": 3, "mask_iterations": 2}, "swap": {"sweeps": 1}, "maskllm": {"prior": "wanda"}}


@pytest.fixture
def batches():
    """Documents of 17 and 9 tokens, one a batch."""
    documents = [torch.randint(3, 260, (1, length)) for length in (17, 9)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()} for ids in documents]


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in list_methods()), ("qwen3-moe", "wanda"), ("gemma2-mixed", "wanda")],
)
def test_every_method_on_the_gpu(family, name, batches):
    on_cpu, on_gpu = (unfold_linears_(tiny_model(family)) for _ in range(2))
    options = {"include": ["q_proj", "down_proj"], **OPTIONS.get(name, {})}
    expected = prune_(on_cpu, name, batches, **options)
    with fake_gpu():
        found = prune_(on_gpu.to("cuda"), name, batches, **options)
        assert all(not is_on_gpu(mask) for mask in found.values())
        assert all(map(is_on_gpu, on_gpu.parameters()))
        assert all(torch.equal(found[layer], mask) for layer, mask in expected.items())
        for (layer, weight), other in zip(on_gpu.named_parameters(), on_cpu.parameters(), strict=True):
            assert torch.equal(weight.cpu(), other), layer


@pytest.mark.parametrize("name", list_allocations())
def test_every_allocation_on_the_gpu(name, batches):
    options = {"owl": {"outlier_factor": 2.0}, "alphapruning": {"epsilon": 0.9}}.get(name, {})
    model = unfold_linears_(tiny_model("llama"))
    layers = prunable_layers(model, "4:8")
    for index, layer in enumerate(layers.values()):
        layer.weight.data[0] *= 1 + index  # so that the blocks differ
    expected = allocate(name, model, layers, batches, "4:8", **options)
    with fake_gpu():
        assert allocate(name, model.to("cuda"), layers, batches, "4:8", **options) == expected


def test_packing_on_the_gpu():
    weight = pruned_model().model.layers[0].mlp.up_proj.weight.data
    values, indices = pack_nm(weight)
    for kernels in (True, False):
        with fake_gpu(kernels=kernels):
            found = pack_nm(weight.to("cuda"))
            assert all(map(is_on_gpu, found))
            assert torch.equal(found[0].cpu(), values)
            assert torch.equal(found[1].cpu(), indices)
            assert torch.equal(unpack_nm(*found).cpu(), weight)
            with pytest.raises(ValueError, match=r"indices are torch.uint8 .* on cpu"):
                unpack_nm(found[0], indices)


# compute capability, rows -> what serves a bfloat16 layer where the extension is built; CUTLASS is not built here
CHOICES = {((9, 0), 1): "gemv", ((9, 0), 16): "gemv", ((9, 0), 17): "reference", ((7, 5), 1): "reference"}


@pytest.mark.parametrize(("capability", "rows"), CHOICES)
def test_the_choice_of_a_backend_on_the_gpu(capability, rows):
    with fake_gpu(capability):
        x = torch.zeros(rows, 64, dtype=torch.bfloat16, device="cuda")
        values = torch.zeros(32, 32, dtype=torch.bfloat16, device="cuda")
        kernels = {name: get_kernel("sparse_linear", name) for name in list_backends("sparse_linear")}
        reasons = {name: kernel.supports(x, values) for name, kernel in kernels.items()}
        assert reasons["reference"] is None
        assert "supports only the CPU" in reasons["cpp"]
        assert (reasons["gemv"] is None) == (rows <= 16 and capability >= (8, 0))
        assert choose(x, values).backend == CHOICES[capability, rows]
        for name in ("gemv", "cutlass"):
            assert "on cpu" in kernels[name].supports(x, values.cpu())


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_on_the_gpu(bits):
    """Few rows by gemv, many by torch, as on the CPU."""
    layer = SparseLinear.from_linear(pruned_linear(64, 32, dtype=torch.bfloat16), bits=bits)
    x = torch.randn(20, 64).bfloat16()
    expected = layer(x)
    with fake_gpu():
        layer, x = layer.to("cuda"), x.to("cuda")
        for rows, backend in ((3, "gemv"), (20, "reference")):
            assert choose(x[:rows], layer.values).backend == backend
            torch.testing.assert_close(layer(x[:rows]).cpu(), expected[:rows], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_packed_model_there_and_back(kernels):
    model = pruned_model(dtype=torch.bfloat16)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    x = torch.randint(3, 260, (1, 9))
    expected = model(x).logits
    with fake_gpu(kernels=kernels):
        sparsify_(model.to("cuda"))
        packed = [module for module in model.modules() if isinstance(module, SparseLinear)]
        assert all(is_on_gpu(layer.values) and is_on_gpu(layer.indices) for layer in packed)
        torch.testing.assert_close(model(x.to("cuda")).logits.cpu(), expected)
        unsparsify_(model)
        assert all(torch.equal(weight.cpu(), weights[name]) for name, weight in model.state_dict().items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model and a text."""
    path = tmp_path_factory.mktemp("fake-gpu")
    save_tiny_model("llama", path / "model")
    save_texts(path / "text.jsonl", documents=20)
    return path


def flags(folder, *more: str) -> list[str]:
    """The command line of a short run."""
    text = str(folder / "text.jsonl")
    short = ["--num_samples", "4", "--seq_len", "32", "--eval_seq_len", "32", "--eval_max_windows", "1"]
    return ["--model", str(folder / "model"), "--data", text, "--eval_data", text, "--precision", "fp32", *short, *more]


def result(run_dir) -> tuple[str, list]:
    """The name of the device, and the fields of result.json that do not depend on it."""
    found = json.loads((run_dir / "result.json").read_text())
    same = ("status", "masks_sha256", "perplexity", "feasible_share", "mask_similarity")
    return found["environment"]["device"], [found.get(key) for key in same]


@pytest.mark.parametrize(
    ("command", "more"),
    [(train.main, ["--max_steps", "1"]), (prune.main, ["--method", "wanda"])],
    ids=["train", "prune"],
)
def test_a_whole_command_on_the_gpu(command, more, folder, tmp_path):
    on_cpu, on_gpu = tmp_path / "cpu", tmp_path / "gpu"
    assert command(flags(folder, *more, "--device", "cpu", "--output_dir", str(on_cpu))) == 0
    with fake_gpu():
        assert command(flags(folder, *more, "--device", "auto", "--output_dir", str(on_gpu))) == 0
    assert result(on_gpu) == ("fake GPU", result(on_cpu)[1])
    for file in ("model.safetensors", "masks.safetensors"):
        assert (on_gpu / file).stat().st_size == (on_cpu / file).stat().st_size


def test_evaluation_on_the_gpu(folder, tmp_path):
    def scores(device: str) -> dict:
        short = ["--data", str(folder / "text.jsonl"), "--seq_len", "32", "--max_windows", "2", "--precision", "bf16"]
        evaluate.main([str(folder / "model"), *short, "--device", device, "--json", str(tmp_path / "scores.jsonl")])
        return json.loads((tmp_path / "scores.jsonl").read_text())

    expected = scores("cpu")
    with fake_gpu():
        assert scores("cuda:0") == expected


@pytest.mark.skipif(not module.is_installed(), reason=f"lm-eval is not installed; run: {module.INSTALL}")
def test_lm_eval_on_the_gpu():
    from lm_eval.api.instance import Instance

    pairs = [("What is wet?", " the sea"), ("Who flies?", " birds and, now and then, a squirrel"), ("", " x")]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    model = tiny_model("llama")
    expected = module.language_model(model, byte_tokenizer(), 2, None).loglikelihood(requests, disable_tqdm=True)
    with fake_gpu():
        lm = module.language_model(model.to("cuda"), byte_tokenizer(), 2, None)
        assert torch.device(lm.device).type == "cuda"
        found = lm.loglikelihood(requests, disable_tqdm=True)
    assert found == expected


def test_env_on_the_gpu(capsys):
    with fake_gpu():
        assert env.main([]) == 0
    printed = capsys.readouterr().out
    assert "device fake GPU" in printed
    assert "backends for a bfloat16 2:4 weight on cuda" in printed
