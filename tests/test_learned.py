"""What learns: under the mask the model computes with W0 under it, and the gradient reaches every weight."""

import contextlib
import copy
import itertools
import json
import math
from functools import partial

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from proxsparse import NMPattern, ProxAdamW, nm_mask
from proxsparse.data.calibration import collate
from proxsparse.errors import InputError
from proxsparse.models.layers import prunable_layers
from proxsparse.models.snap import copy_weights, snap_
from proxsparse.training import loop
from proxsparse.training.learnable_layer import LearnableLayer, dense, make_learnable_layers
from proxsparse.training.log import run_log
from proxsparse.training.loss import training_loss
from proxsparse.training.mask_monitor import MaskMonitor
from proxsparse.training.optimizer import prox_adamw, weights_of
from proxsparse.training.options import LearningOptions
from proxsparse.training.state import TrainState

PATTERN = NMPattern(2, 4)


@pytest.fixture
def model():
    return tiny_model("llama")


def layer_and_scale():
    layer = nn.Linear(16, 6, bias=False)
    layer.weight.data[0, :3] = 0.0  # pretrained zeros are common: a block may hold several
    return layer, torch.rand(16) + 0.5


def under_masks(layers: dict, scales=None, masked=True) -> dict[str, LearnableLayer]:
    """The layers learn under their masks from now on."""
    pretrained = {f"{name}.weight": layer.weight.detach().clone() for name, layer in layers.items()}
    return make_learnable_layers(layers, pretrained, scales or {}, dict.fromkeys(layers, PATTERN), masked)


def test_the_forward_pass_sees_the_mask_of_what_is_learned_and_the_gradient_does_not():
    layer, scale = layer_and_scale()
    pretrained = layer.weight.detach().clone()
    mask = nm_mask((pretrained * scale).abs(), PATTERN)
    learned = under_masks({"a": layer}, {"a": scale})["a"]
    inputs = torch.randn(5, 16)
    output = layer(inputs)
    torch.testing.assert_close(output, inputs @ torch.where(mask, pretrained, 0.0).T)
    output.square().sum().backward()
    learned.take_gradient_()
    torch.testing.assert_close(learned.weight.grad, 2 * output.detach().T @ inputs)  # dense: pruned ones too
    assert layer.weight.grad is None
    torch.nn.init.normal_(learned.weight)
    learned.remask_()
    mask = nm_mask(learned.weight.detach() * scale * pretrained.sign(), PATTERN)
    assert torch.equal(learned.mask(), mask)
    assert torch.equal(layer.weight, torch.where(mask, pretrained, 0.0))
    assert not layer.weight[~mask].signbit().any()


def test_weights_of_the_dtype_of_autocast_stay_in_it():
    """With the same output and gradient, because autocast would cast them."""
    layer, scale = layer_and_scale()
    layer.weight.data = layer.weight.detach().bfloat16().float()
    other, found = copy.deepcopy(layer), []
    for each, dtype in ((layer, torch.float32), (other, torch.bfloat16)):
        pretrained = {"a.weight": each.weight.detach().to(dtype, copy=True)}
        given = {"a": each}, pretrained, {"a": scale}, {"a": PATTERN}, True, torch.bfloat16
        (learned,) = make_learnable_layers(*given).values()
        assert (each.weight.dtype, learned.weight.dtype) == (dtype, torch.float32)
        optimizer = ProxAdamW([learned.weight], lr=0.1, reg_lambda=0.01)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                output = each(torch.arange(80.0).view(5, 16) / 80)
            output.float().square().sum().backward()
            learned.take_gradient_()
            assert learned.weight.grad.dtype == dtype
            optimizer.step()
            learned.remask_()
        found.append([output.detach(), learned.weight.detach(), each.weight.float()])
    for one, same in zip(*found, strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_clipped_by_their_norm_in_float32(dtype):
    weights = [nn.Parameter(torch.randn(30, 40)) for _ in range(3)]
    for weight in weights:
        weight.grad_dtype = dtype
        weight.grad = torch.randn(30, 40).to(dtype)
    before = torch.cat([weight.grad.double().flatten() for weight in weights])
    for largest, factor in ((math.inf, 1.0), (7.0, 7.0 / before.norm().item())):
        norm = loop.clip_gradients_([*weights, nn.Parameter(torch.ones(2))], largest)
        assert norm.item() == pytest.approx(before.norm().item(), rel=1e-6)
        after = torch.cat([weight.grad.double().flatten() for weight in weights])
        torch.testing.assert_close(after, factor * before, rtol=torch.finfo(dtype).eps, atol=0)


def test_the_dense_model_is_there_only_within_the_block(model):
    """W0 itself, unchanged, also after an error; a copy in the layer whose W0 has another dtype."""
    learned = under_masks(prunable_layers(model))
    before = {name: one.layer.weight.detach().clone() for name, one in learned.items()}
    pretrained = {name: one.pretrained.clone() for name, one in learned.items()}
    last = [*learned.values()][-1]
    last.pretrained = last.pretrained.double()
    with contextlib.suppress(ZeroDivisionError), dense(model, learned.values()):
        for name, one in learned.items():
            assert torch.equal(one.layer.weight, pretrained[name])
            assert (one.layer.weight.data_ptr() == one.pretrained.data_ptr()) == (one is not last)
        raise ZeroDivisionError
    for name, one in learned.items():
        assert torch.equal(one.layer.weight, before[name])
        assert torch.equal(one.pretrained.float(), pretrained[name])


def test_what_is_saved_is_what_was_measured(model):
    layers, pretrained = prunable_layers(model), copy_weights(model)
    learned = under_masks(layers)
    with torch.no_grad():
        for one in learned.values():
            one.weight.add_(0.02 * torch.randn(one.weight.shape))
            one.remask_()
    ids = torch.randint(0, 50, (2, 12))
    measured = model(input_ids=ids).logits
    snap_(model, pretrained, {name: one.mask() for name, one in learned.items()})
    assert torch.equal(model(input_ids=ids).logits, measured)
    assert set(dict(model.named_parameters())) == set(pretrained)


def test_a_step_gathers_the_gradient_of_the_mean_over_all_its_tokens(model):
    layers = prunable_layers(model)
    learned = under_masks(layers)
    model.train()
    documents = [torch.randint(3, 50, (length,)).tolist() for length in (12, 5)]
    loss = loop.backward(model, [collate([document], 0) for document in documents], None, partial(training_loss, model))
    found = {name: layer.weight.grad.clone() for name, layer in layers.items()}
    model.zero_grad()
    expected = training_loss(model, collate(documents, 0))
    expected.backward()
    assert loss == pytest.approx(expected.item())
    for name, layer in layers.items():
        torch.testing.assert_close(found[name], layer.weight.grad)
        assert (found[name][~learned[name].mask()] != 0).any(), "pruned weights have a gradient too"


def new_state(**settings) -> TrainState:
    """The state before the first of 4 steps."""
    options, model = LearningOptions(**{"learning_rate": 0.01, **settings}).check(), tiny_model("llama")
    learned = under_masks(prunable_layers(model), masked=options.masked)
    return TrainState(model, learned, options, 4, prox_adamw(model, learned, options), MaskMonitor(learned.values(), 4))


def test_under_the_mask_only_the_prunable_weights_move():
    """If the others moved, the loss would not be that of the model that is saved."""
    masked, paper = (new_state(objective=objective) for objective in ("masked", "paper"))
    assert weights_of(masked.optimizer).keys() == {f"{name}.weight" for name in masked.layers}
    assert weights_of(paper.optimizer).keys() == dict(paper.model.named_parameters()).keys()


def test_every_layer_has_the_prox_of_its_pattern_and_learns_more_slowly_if_it_keeps_more_than_half():
    patterns = {f"layers.{place}": pattern for place, pattern in enumerate(["2:4", "4:6", "6:8", "1:4"])}
    for objective, factors in (("masked", [1, 0.3, 0.3, 1]), ("paper", [1, 1, 1, 1])):
        options = LearningOptions(objective=objective, learning_rate=0.01, reg_lambda=0.002).check()
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(24, 8) for _ in patterns)})
        layers = {name: model.get_submodule(name) for name in patterns}
        pretrained = {f"{name}.weight": layer.weight.detach().clone() for name, layer in layers.items()}
        parsed = {name: NMPattern.parse(pattern) for name, pattern in patterns.items()}
        learned = make_learnable_layers(layers, pretrained, {}, parsed, options.masked)
        groups = prox_adamw(model, learned, options).param_groups
        learned_groups = [group for group in groups if group["param_names"][0].endswith("weight")]
        assert [group["pattern"] for group in learned_groups] == list(patterns.values())
        for name, value in (("lr", 0.01), ("reg_lambda", 0.002)):
            found = [group[name] for group in learned_groups]
            assert found == pytest.approx([value * factor for factor in factors])


def learned_by(documents: list) -> tuple[dict, list[dict]]:
    """The weights after 4 steps, and the figures of each step."""
    state, samples = new_state(), itertools.cycle(documents)
    rows = [loop.train_step(state, samples, partial(training_loss, state.model), None) for _ in range(4)]
    weights = dict(state.model.named_parameters()) | weights_of(state.optimizer)
    return {name: weight.detach() for name, weight in weights.items()}, rows


@pytest.fixture
def documents():
    return [collate([torch.randint(3, 50, (12,)).tolist()], 0) for _ in range(12)]


def test_a_step_that_is_not_logged_is_the_same_step(documents, monkeypatch):
    weights, rows = learned_by(documents)
    monkeypatch.setattr("proxsparse.training.state.LOG_POINTS", 2)
    monkeypatch.setattr(MaskMonitor, "measures", lambda *_: False)
    others, other_rows = learned_by(documents)
    assert ["loss" in row for row in other_rows] == [False, True] * 2
    assert [row["grad_norm"] for row in rows] == [float(row["grad_norm"]) for row in other_rows]
    assert rows[1::2] == other_rows[1::2]
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


def test_a_gradient_that_is_not_finite_is_refused(documents):
    state = new_state()
    next(iter(state.layers.values())).layer.weight.register_hook(lambda gradient: gradient * float("nan"))
    loss = partial(training_loss, state.model)
    with pytest.raises(InputError, match="gradient norm is nan; lower --learning_rate"):
        loop.train_step(state, iter(documents), loss, None)


def test_a_gradient_of_a_step_that_is_not_logged_is_refused_later(documents, monkeypatch):
    """Under masks the loss of the steps after it is finite, because W0 is."""
    monkeypatch.setattr("proxsparse.training.state.LOG_POINTS", 1)
    monkeypatch.setattr(MaskMonitor, "measures", lambda *_: False)
    state, samples = new_state(), iter(documents)
    hook = next(iter(state.layers.values())).layer.weight.register_hook(lambda gradient: gradient * float("nan"))
    for _ in range(3):
        row = loop.train_step(state, samples, partial(training_loss, state.model), None)
        hook.remove()
    assert math.isfinite(row["grad_norm"])
    with pytest.raises(InputError, match="gradient norm is nan"):  # before a checkpoint
        loop.read_norm(state, row["grad_norm"])
    with pytest.raises(InputError, match="gradient norm is nan; lower --learning_rate"):  # a step that is logged
        loop.train_step(state, samples, partial(training_loss, state.model), None)


ROW = {"loss": 2.5, "learning_rate": 1e-3, "feasible_share": 0.25, "mask_change": 0.125}
ROWS = [{"step": step, **ROW} for step in (1, 3)]


def test_every_row_is_flushed_and_a_resumed_run_replaces_later_rows(tmp_path):
    """metrics.jsonl has every finished step at any moment."""
    for done in (0, 1):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": ' * done)  # of a killed process
        with run_log(tmp_path, done, 5, "2:4") as log_step:
            for count, row in enumerate(ROWS[done:], done + 1):
                log_step({"grad_norm": 1.0})  # a step that is not logged
                log_step(row)
                written = (tmp_path / "metrics.jsonl").read_text()
                assert [json.loads(line) for line in written.splitlines()] == ROWS[:count], "flushed with every step"
                assert written.endswith("\n")
