"""Whether the fake GPU keeps to the rules of torch, and the parts of learning on it, against the same on the CPU."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import fake_gpu, is_on_gpu
from tiny_models import tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode

from proxsparse import ProxAdamW, ProxOptimizer, nm_mask, prox_nm_
from proxsparse.data.calibration import collate
from proxsparse.evaluation.perplexity import perplexity
from proxsparse.methods.proxsparse import learn
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.models.snap import snap_
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.ops import prox_nm_list_
from proxsparse.patterns import NMPattern
from proxsparse.runtime import sharding
from proxsparse.runtime.device import autocast, choose_device, choose_precision
from proxsparse.runtime.signals import StopSignal
from proxsparse.training import checkpoint, loop
from proxsparse.training.distillation import teacher_targets
from proxsparse.training.learnable_layer import make_learnable_layers
from proxsparse.training.mask_monitor import agreement, feasible_share
from proxsparse.training.optimizer import weights_of
from proxsparse.training.options import LearningOptions
from proxsparse.training.scaling import activation_scaling

PATTERN = NMPattern(2, 4)
# g, c: matrices [4, 4] on the GPU and on the CPU; s: a number on the CPU; i, j: indices on the CPU and on the GPU.
MIXED = {
    "g + c": lambda g, c, s, i, j: g + c,
    "g.mul_(c)": lambda g, c, s, i, j: g.mul_(c),
    "c.mul_(g)": lambda g, c, s, i, j: c.mul_(g),
    "g @ c": lambda g, c, s, i, j: g @ c,
    "cat": lambda g, c, s, i, j: torch.cat([g, c]),
    "where": lambda g, c, s, i, j: torch.where(c > 0, g, 0.0),
    "gather": lambda g, c, s, i, j: g.gather(1, i[:, None]),
    "embedding": lambda g, c, s, i, j: torch.nn.functional.embedding(i, g),
    "c[j]": lambda g, c, s, i, j: c[j],
    "g[i] = c": lambda g, c, s, i, j: g.index_put_((i,), c),
    "s.add_(g)": lambda g, c, s, i, j: s.add_(g[0, 0]),
    "sum": lambda g, c, s, i, j: c + g.sum(),
}
ALLOWED = {
    "g * 2": lambda g, c, s, i, j: g * 2,
    "g * s": lambda g, c, s, i, j: g * s,
    "g[i]": lambda g, c, s, i, j: g[i],
    "g[j]": lambda g, c, s, i, j: g[j],
    "g[i] = s": lambda g, c, s, i, j: g.index_put_((i,), s),
    "g.copy_(c)": lambda g, c, s, i, j: g.copy_(c),
    "c.copy_(g)": lambda g, c, s, i, j: c.copy_(g),
    "where": lambda g, c, s, i, j: torch.where(g > 0, g, s),
    "fill": lambda g, c, s, i, j: g.masked_fill(g > 0, 1.0),
}


def tensors(device: str) -> tuple:
    """The arguments of the functions above."""
    numbers, indices = torch.ones(4, 4), torch.tensor([1, 2, 3, 0])
    on_gpu = torch.empty(4, 4, device=device), torch.empty(4, dtype=torch.int64, device=device)
    return on_gpu[0].fill_(1.0), numbers, torch.tensor(2.0), indices, on_gpu[1].fill_(1)


@pytest.mark.parametrize("name", MIXED)
def test_an_operation_that_mixes_devices_raises(name):
    with fake_gpu(), pytest.raises(RuntimeError, match=r"same device|on cpu"):
        MIXED[name](*tensors("cuda"))


@pytest.mark.parametrize("name", ALLOWED)
def test_what_torch_allows_is_allowed(name):
    with fake_gpu():
        ALLOWED[name](*tensors("cuda"))
    ALLOWED[name](*tensors("cpu"))


# torch's fake tensors let these pass, CUDA does not: a number on the CPU is neither an output nor an operand here.
STRICTER = {"c[j]", "s.add_(g)"}


@pytest.mark.parametrize("name", sorted(MIXED.keys() - STRICTER))
def test_torchs_own_fake_tensors_refuse_the_same(name):
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((RuntimeError, AssertionError)):
        MIXED[name](*tensors("cuda"))


def test_views_parameters_and_copies_keep_their_device():
    with fake_gpu() as gpu:
        weight = torch.arange(8.0).to("cuda").view(2, 4)
        parameter = torch.nn.Parameter(weight)
        related = weight[0], parameter, parameter.data, weight.T, weight.bfloat16(), weight.new_zeros(2), weight.clone()
        assert {tensor.device.type for tensor in related} == {"cuda"}
        assert {tensor.device.type for tensor in (weight.cpu(), torch.zeros_like(weight).to("cpu"))} == {"cpu"}
        assert weight.to("cuda") is weight
        assert weight.cpu().tolist() == torch.arange(8.0).view(2, 4).tolist()
        gradient = torch.autograd.grad(parameter.square().sum(), parameter)[0]
        assert gradient.device.type == "cuda"
        gpu.waits.clear()
        assert weight.sum().item() == 28.0
        assert gpu.waits == {"value: test_fake_gpu.py test_views_parameters_and_copies_keep_their_device": 1}
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            weight.numpy()
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
            torch.empty(2, device="cuda").normal_(generator=torch.Generator())
        torch.empty(2, device="cuda").normal_(generator=torch.Generator("cuda").manual_seed(0))
    assert torch.zeros(2).device.type == "cpu"


def test_a_graph_repeats_its_operations_and_no_python():
    counter = itertools.count()
    with fake_gpu():
        x, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1).mul_(x + next(counter))
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                x.sum().item()
        assert x.tolist() == [1, 1]  # a capture computes nothing
        graph.replay()
        graph.replay()
        assert x.tolist() == [25, 25]  # 1 -> (1 + 1) * 2 -> (4 + 1) * 5
        assert next(counter) == 1


# ---------------------------------------------------------------------------------------------- learning


def batches(documents=4, length=12) -> list[dict]:
    """Of two documents each; the second is shorter."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 260, (documents, length), generator=generator).tolist()
    return [collate([first, second[:-3]], 0) for first, second in zip(ids[::2], ids[1::2], strict=True)]


def learning_state(device: str, precision: str = "fp32", keep: str = "device", **settings):
    """A tiny model on the device that is about to learn: (state, batches, compute dtype, W0 by parameter name)."""
    options, device = LearningOptions(max_steps=2, **settings).check(), choose_device(device)
    weight_dtype, compute_dtype = choose_precision(precision, device)
    model = unfold_linears_(tiny_model("llama", torch.bfloat16, num_hidden_layers=1))
    layers, samples = prunable_layers(model, PATTERN), batches()
    pretrained = sharding.shard_and_move_(model, decoder_blocks(model), device, weight_dtype, keep, False)
    with autocast(device, compute_dtype):
        if options.distill:
            samples = teacher_targets(model, samples)
        scaled = options.scaling == "activation"
        scales = activation_scaling(model, layers, samples, options.scaling_samples) if scaled else {}
    masked, patterns = options.forward == "masked", dict.fromkeys(layers, PATTERN)
    learned = make_learnable_layers(layers, pretrained, scales, patterns, masked, {})
    return loop.TrainState.begin(model, learned, options, 2), samples, compute_dtype, pretrained


def learned_rows(state, samples: list[dict], compute_dtype) -> list[dict]:
    """The rows of the log of two steps, without the time."""
    rows = []
    log = SimpleNamespace(step=rows.append)
    learn(state, loop.own_samples(samples, 0, 0), compute_dtype, log, StopSignal(), lambda: None)
    return [{**row, "seconds": None} for row in rows]


STEPS = {
    "masked": {},
    "dense": {"forward": "dense"},
    "all": {"objective": "paper", "reg_lambda": 5.0},
    "prunable": {"objective": "paper", "update": "prunable", "keep": "cpu"},
    "distill": {"distill": 0.5, "precision": "mixed"},
    "accumulation": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "in-backward": {"step_in_backward": True, "max_grad_norm": 0.0},
    "disk": {"keep": "disk"},
    "bf16": {"precision": "bf16"},
    "moments": {"moment_dtype": "bf16"},
    "master": {"precision": "bf16", "master_weights": True},
    "frozen": {"objective": "paper", "frozen_lambda": 0.5},
}


@pytest.mark.parametrize("settings", STEPS.values(), ids=STEPS)
def test_learning_on_the_gpu(settings, tmp_path):
    state, samples, compute_dtype, _ = learning_state("cpu", **settings)
    rows, expected = learned_rows(state, samples, compute_dtype), weights_of(state.optimizer)
    with fake_gpu():
        state, samples, compute_dtype, pretrained = learning_state("cuda", **settings)
        assert all(parameter.is_cuda for parameter in state.model.parameters())
        place = "cuda" if settings.get("keep", "device") == "device" else "cpu"
        assert {weight.device.type for weight in pretrained.values()} == {place}
        assert learned_rows(state, samples, compute_dtype) == rows
        found = weights_of(state.optimizer)
        assert all(weight.is_cuda for weight in found.values())
        moments = [state.optimizer.state[weight] for weight in found.values()]
        assert all(held[key].is_cuda for held in moments for key in held if key != "step")
        assert all(torch.equal(weight.cpu(), expected[name]) for name, weight in found.items())

        masks = state.masks()
        magnitude = {name: nm_mask(one.pretrained.abs()).cpu() for name, one in state.learned.items()}
        assert 0.5 < agreement(masks, magnitude, state.learned) < 1
        assert 0 <= feasible_share(state.learned.values()) <= 1
        snap_(state.model, pretrained, masks)
        for name, mask in masks.items():
            weight = state.model.get_parameter(f"{name}.weight")
            assert weight.is_cuda
            assert torch.equal(weight.cpu(), torch.where(mask, pretrained[f"{name}.weight"].cpu(), 0.0))


def test_a_learning_step_waits_for_the_gpu_only_where_it_must():
    """At each pass the samples are copied and the loss is read; once a step the norm and the monitor's sample."""
    with fake_gpu() as gpu:
        state, samples, compute_dtype, _ = learning_state("cuda", distill=0.5, gradient_accumulation_steps=2)
        gpu.waits.clear()
        learned_rows(state, samples, compute_dtype)
        ours = {place: count / 2 for place, count in gpu.waits.items() if not place.endswith("in transformers")}
    assert ours == {
        "copy to the GPU: training/distillation.py logits_at_labels": 2
        * 4,  # ids, attention mask, labels, which are real
        "copy to the GPU: training/distillation.py calibration_loss": 2 * 2,  # what the teacher predicts
        "value: training/loop.py backward": 2,
        "value: training/loop.py step_": 1,
        "copy to the CPU: training/mask_monitor.py MaskMonitor._sample": 1,
    }


def test_a_checkpoint_of_a_run_on_the_gpu(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with fake_gpu():
        state, samples, compute_dtype, _ = learning_state("cuda", average_runs=2)
        learned_rows(state, samples, compute_dtype)
        state.step = 1
        checkpoint.save(tmp_path, state, {})
        again, *_ = learning_state("cuda", average_runs=2)
        facts = checkpoint.read_facts(tmp_path / "checkpoint-1")
        checkpoint.restore_(tmp_path / "checkpoint-1", facts, again)
        before, after = checkpoint.tensors_of(state), checkpoint.tensors_of(again)
        for name, tensor in before.items():
            assert after[name].device == tensor.device, name
            assert torch.equal(after[name].cpu(), tensor.cpu()), name


def test_perplexity_waits_once():
    model, tokens = tiny_model("llama"), torch.randint(3, 260, (4 * 16 + 5,))
    expected = perplexity(model, tokens, 16)
    with fake_gpu() as gpu:
        model.to("cuda")
        gpu.waits.clear()
        assert perplexity(model, tokens, 16) == expected
        ours = {place: count for place, count in gpu.waits.items() if not place.endswith("in transformers")}
    place = "evaluation/perplexity.py perplexity"
    assert ours == {f"copy to the GPU: {place}": 1, f"value: {place}": 1}


# ---------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["ProxAdamW", "ProxOptimizer"])
def test_optimizers_on_the_gpu(kind, scaled):
    def stepped(device: str) -> dict:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(6, 8).to(device)) for _ in range(2)]
        bias = torch.nn.Parameter(torch.randn(6).to(device))

        def make():
            if kind == "ProxAdamW":
                return ProxAdamW([*weights, bias], lr=0.1, reg_lambda=0.5, frozen_lambda=0.1)
            return ProxOptimizer(torch.optim.AdamW([*weights, bias], lr=0.1), reg_lambda=0.5, frozen_lambda=0.1)

        optimizer = make()
        if scaled:
            optimizer.set_scale(weights[0], torch.rand(8) + 0.5)
        for step in range(3):
            for parameter in (*weights, bias):
                parameter.grad = torch.full_like(parameter, 0.1 * step)
            optimizer.step()
            saved = optimizer.state_dict()
            optimizer = make()
            optimizer.load_state_dict(saved)
        assert all(held.device.type == device for held in optimizer.state[weights[0]].values() if held.ndim)
        return {f"{i}": parameter.detach().cpu() for i, parameter in enumerate((*weights, bias))}

    expected = stepped("cpu")
    with fake_gpu():
        found = stepped("cuda")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight)


@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_prox_on_the_gpu(pattern):
    weights = [torch.randn(3, 16), torch.randn(2, 5, 32), torch.randn(16, 6).T]
    expected = [prox_nm_(weight.clone(), 0.7, pattern) for weight in weights]
    with fake_gpu():
        on_gpu = [weight.to("cuda") for weight in weights]
        prox_nm_list_(on_gpu, [0.7] * 3, pattern)
        assert all(map(is_on_gpu, on_gpu))
        for weight, result in zip(on_gpu, expected, strict=True):
            torch.testing.assert_close(weight.cpu(), result)
        with pytest.raises(ValueError, match=r"on cpu: it must hold .* on cuda:0"):
            prox_nm_(on_gpu[0], 0.7, pattern, scale=torch.ones(16))


def test_the_ops_have_fakes_for_the_gpu():
    """torch's own fake tensors: what a compiled step and --plan need of every op."""
    with FakeTensorMode():
        weight, score = (torch.empty(4, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        moments = [torch.empty(4, 8, device="cuda") for _ in range(2)]
        torch.ops.proxsparse.adamw_prox_(
            weight, score, *moments, None, None, None, 1, 0.1, 0.9, 0.99, 1e-8, 0.0, 0.5, 2, 4, 0.0, 0.1, None
        )
        torch.ops.proxsparse.prox_nm_(weight, 0.5, 2, 4)
        torch.ops.proxsparse.prox_nm_list_([weight, score], [0.5, 0.5], 2, 4)
        values, indices = torch.ops.proxsparse.pack_nm(weight, 2, 4)
        y = torch.ops.proxsparse.sparse_linear(score, values, indices, None, None, "auto")
        mask, unpacked = (
            torch.ops.proxsparse.nm_mask(score, 2, 4),
            torch.ops.proxsparse.unpack_nm(values, indices, 2, 4),
        )
        assert {tensor.device.type for tensor in (values, indices, y, mask, unpacked)} == {"cuda"}
        assert (y.shape, mask.shape, unpacked.shape) == ((4, 4), (4, 8), (4, 8))
        with pytest.raises(ValueError, match="x is on cpu, values on cuda:0"):
            torch.ops.proxsparse.sparse_linear(
                torch.empty(4, 8, dtype=torch.bfloat16), values, indices, None, None, "auto"
            )
