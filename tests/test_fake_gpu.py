"""The parts of learning and the optimizers on the fake GPU: each gives there what it gives on the CPU."""

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


def test_the_fake_gpu_refuses_what_a_gpu_refuses():
    counter = itertools.count()
    with fake_gpu() as gpu:
        x, cpu, graph = torch.ones(2, device="cuda"), torch.ones(2), torch.cuda.CUDAGraph()
        for mixed in (lambda: x + cpu, lambda: cpu.mul_(x), lambda: torch.cat([x, cpu]), lambda: cpu[x.long()]):
            with pytest.raises(RuntimeError, match=r"same device|on cpu"):
                mixed()
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
            x.normal_(generator=torch.Generator())
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            x.numpy()
        assert (x * torch.tensor(2.0))[torch.tensor([0])].is_cuda  # a number and indices may be on the CPU
        gpu.waits.clear()
        assert x.sum().item() == 2
        assert list(gpu.waits) == ["value: test_fake_gpu.py test_the_fake_gpu_refuses_what_a_gpu_refuses"]
        with torch.cuda.graph(graph):
            x.add_(1).mul_(x + next(counter))
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                x.sum().item()
        assert x.tolist() == [1, 1]  # a capture computes nothing
        graph.replay()
        graph.replay()
        assert x.tolist() == [25, 25]  # 1 -> (1 + 1) * 2 -> (4 + 1) * 5
    assert torch.zeros(2).device.type == "cpu"


def batches() -> list[dict]:
    """Two of two documents each; the second is shorter."""
    ids = torch.randint(3, 260, (4, 12), generator=torch.Generator().manual_seed(1)).tolist()
    return [collate([first, second[:-3]], 0) for first, second in zip(ids[::2], ids[1::2], strict=True)]


def learning_state(device: str, precision: str = "fp32", keep: str = "device", **settings):
    """A tiny model on the device that is about to learn: (state, batches, compute dtype, W0 by parameter name)."""
    options, device = LearningOptions(max_steps=2, **settings).check(), choose_device(device)
    weight_dtype, compute_dtype = choose_precision(precision, device)
    model = unfold_linears_(tiny_model("llama", torch.bfloat16, num_hidden_layers=2 if options.match_hidden else 1))
    layers, samples = prunable_layers(model, PATTERN), batches()
    pretrained = sharding.shard_and_move_(model, decoder_blocks(model), device, weight_dtype, keep, False)
    with autocast(device, compute_dtype):
        if options.distill:
            samples = teacher_targets(model, samples)
        scaled = options.scaling == "activation"
        scales = activation_scaling(model, layers, samples, options.scaling_samples) if scaled else {}
    masked, patterns = options.forward == "masked", dict.fromkeys(layers, PATTERN)
    learned = make_learnable_layers(layers, pretrained, scales, patterns, masked)
    return loop.TrainState.begin(model, learned, options, 2), samples, compute_dtype, pretrained


def learned_rows(state, samples: list[dict], compute_dtype) -> list[dict]:
    """The rows of the log of two steps, without the time."""
    rows = []
    log = SimpleNamespace(step=rows.append)
    learn(state, loop.own_samples(samples, 0, 0), compute_dtype, log, StopSignal(), lambda: None)
    return [{**row, "seconds": None} for row in rows]


STEPS = {
    "dense": {"forward": "dense"},
    "all": {"objective": "paper", "reg_lambda": 5.0},
    "prunable": {"objective": "paper", "update": "prunable", "keep": "cpu"},
    "distill": {"distill": 0.5, "precision": "mixed"},
    "hidden": {"match_hidden": 16.0, "distill": 0.5, "precision": "mixed"},
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
        # ids, attention mask, labels, which of them are real; what the teacher predicts
        "copy to the GPU: training/distillation.py logits_and_states": 2 * 4,
        "copy to the GPU: training/distillation.py calibration_loss": 2 * 2,
        "value: training/loop.py backward": 2,
        "value: training/loop.py step_": 1,
        "copy to the CPU: training/mask_monitor.py MaskMonitor._sample": 1,
    }


def test_a_checkpoint_of_a_run_on_the_gpu(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with fake_gpu():
        state, samples, compute_dtype, _ = learning_state("cuda")
        learned_rows(state, samples, compute_dtype)
        state.step = 1
        checkpoint.save(tmp_path, state, {})
        again, *_ = learning_state("cuda")
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


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["ProxAdamW", "ProxOptimizer"])
def test_optimizers_on_the_gpu(kind, scaled):
    def stepped(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape).to(device)) for shape in ((6, 8), (6, 8), (6,))]

        def make():
            if kind == "ProxAdamW":
                return ProxAdamW(parameters, lr=0.1, reg_lambda=0.5, frozen_lambda=0.1)
            return ProxOptimizer(torch.optim.AdamW(parameters, lr=0.1), reg_lambda=0.5, frozen_lambda=0.1)

        optimizer = make()
        if scaled:
            optimizer.set_scale(parameters[0], torch.rand(8) + 0.5)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.1 * step)
            optimizer.step()
            saved, optimizer = optimizer.state_dict(), make()
            optimizer.load_state_dict(saved)
        assert all(held.device.type == device for held in optimizer.state[parameters[0]].values() if held.ndim)
        return [parameter.detach().cpu() for parameter in parameters]

    expected = stepped("cpu")
    with fake_gpu():
        torch.testing.assert_close(stepped("cuda"), expected)


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
        with pytest.raises(ValueError, match=r"on cpu; it must be .* on cuda:0"):
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
        torch.ops.proxsparse.masked_weight_(weight, score, score, None, 2, 4)
        values, indices = torch.ops.proxsparse.pack_nm(weight, 2, 4)
        y = torch.ops.proxsparse.sparse_linear(score, values, indices, None, None, "auto")
        mask = torch.ops.proxsparse.nm_mask(score, 2, 4)
        unpacked = torch.ops.proxsparse.unpack_nm(values, indices, 2, 4)
        assert {tensor.device.type for tensor in (values, indices, y, mask, unpacked)} == {"cuda"}
        assert (y.shape, mask.shape, unpacked.shape) == ((4, 4), (4, 8), (4, 8))
