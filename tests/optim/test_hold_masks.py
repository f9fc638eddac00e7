"""hold_masks_: pruned weights stay +0.0 with zero moments, under every optimizer; kept weights learn as without it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from training import assert_held, loss_of, masks_of, pruned_model, train

from proxsparse import ProxAdamW, ProxOptimizer, hold_masks_, nm_mask

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")

optim = torch.optim
OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "AdamW, amsgrad": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, weight_decay=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1, weight_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5, weight_decay=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01, weight_decay=0.1),
    "Muon": lambda p: optim.Muon([w for w in p if w.ndim == 2], lr=0.01, weight_decay=0.1),
    "ProxAdamW": lambda p: ProxAdamW(p, lr=0.01, weight_decay=0.1, reg_lambda=0.0),
    "ProxAdamW, master weights": lambda p: ProxAdamW(p, lr=0.01, reg_lambda=0.0, master_weights=True),
    "ProxOptimizer": lambda p: ProxOptimizer(optim.AdamW(p, lr=0.01, weight_decay=0.1), reg_lambda=1e-3),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
adamw = OPTIMIZERS["AdamW"]


@pytest.fixture
def held():
    """(model, its masks, an AdamW that holds them)."""
    model = pruned_model()
    masks, optimizer = masks_of(model), adamw(model.parameters())
    hold_masks_(optimizer)
    return model, masks, optimizer


# ------------------------------------------------------------------------------------------- optimizers


@each_optimizer
def test_pruned_weights_stay_zero_and_kept_weights_learn(make):
    model = pruned_model()
    masks, before, loss = masks_of(model), copy.deepcopy(model), loss_of(model).item()
    optimizer = make(model.parameters())
    handle = hold_masks_(optimizer)
    assert repr(handle).startswith("HeldMasks(2 of ")
    for set_to_none in (True, False):
        for _ in range(3):
            optimizer.zero_grad(set_to_none)
            loss_of(model).backward()
            optimizer.step()
            assert_held(masks, optimizer)
    assert loss_of(model) < loss
    for layer in (0, 2):
        kept = masks[model[layer].weight]
        assert (model[layer].weight != before[layer].weight)[kept].any()


@each_optimizer
def test_an_optimizer_that_has_stepped_or_is_loaded_forgets_its_moments(make):
    model = pruned_model()
    masks, saved = masks_of(model), copy.deepcopy(model.state_dict())
    optimizer = make(model.parameters())
    train(model, optimizer, 2)  # as a dense model
    dense = copy.deepcopy(optimizer.state_dict())
    model.load_state_dict(saved)
    handle = hold_masks_(optimizer)
    assert_held(masks, optimizer)
    train(model, optimizer, 2)
    assert_held(masks, optimizer)
    optimizer.load_state_dict(dense)
    assert_held(masks, optimizer)
    assert optimizer.state_dict().keys() == dense.keys()
    train(model, optimizer, 2)
    assert_held(masks, optimizer)
    handle.remove()
    train(model, optimizer, 3)
    assert (model[0].weight != 0).all(), "remove() removes everything"
    assert not any(p._post_accumulate_grad_hooks for p in masks)


def test_moments_that_a_library_has_quantized_stay_as_they_are():
    class Quantized(torch.Tensor):
        """Like those of torchao: has the shape of the weight, but not its storage."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            assert "view" not in str(function)
            return super().__torch_function__(function, types, args, kwargs)

    model = pruned_model()
    masks, saved, optimizer = masks_of(model), copy.deepcopy(model.state_dict()), adamw(model.parameters())
    train(model, optimizer, 1)
    model.load_state_dict(saved)
    state = optimizer.state[model[0].weight]
    state["exp_avg"] = state["exp_avg"].as_subclass(Quantized)
    hold_masks_(optimizer)
    assert_held({model[2].weight: masks[model[2].weight]}, optimizer)
    assert state["exp_avg"].ne(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD, momentum", "ProxAdamW"])
def test_kept_weights_learn_as_with_masked_gradients(name, dtype):
    """The hooks change nothing else: the same bits as a loop that masks gradients itself."""
    model, twin = pruned_model(dtype=dtype), pruned_model(dtype=dtype)
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    masks, kept = masks_of(model), list(masks_of(twin).values())
    hold_masks_(optimizer)
    for _ in range(4):
        train(model, optimizer, 1)
        plain.zero_grad()
        loss_of(twin).backward()
        for weight, mask in zip((twin[0].weight, twin[2].weight), kept, strict=True):
            weight.grad = torch.where(mask, weight.grad, 0.0)
        plain.step()
        for weight, mask in zip((twin[0].weight, twin[2].weight), kept, strict=True):
            weight.data = torch.where(mask, weight, 0.0)  # NaN in float16, where eps of AdamW is 0
    assert_held(masks, optimizer)
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0, equal_nan=dtype == torch.float16)


# ------------------------------------------------------------------------------------------- gradients


def test_clipping_sees_only_kept_gradients_and_nan_at_pruned_places_becomes_zero(held):
    model, masks, optimizer = held
    for weight, kept in masks.items():
        weight.register_hook(lambda grad, kept=kept: torch.where(kept, grad, torch.nan))
    twin = pruned_model()
    loss_of(twin).backward()
    kept_of = masks_of(twin)
    wanted = [torch.where(kept_of[p], p.grad, 0) if p in kept_of else p.grad for p in twin.parameters()]
    loss_of(model).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm, torch.stack([grad.norm() for grad in wanted]).norm())
    optimizer.step()
    assert_held(masks, optimizer)
    assert all(p.isfinite().all() for p in model.parameters())


def test_gradients_that_accumulate_or_are_set_by_hand_or_are_missing():
    model = pruned_model()
    masks, optimizer = masks_of(model), adamw(model.parameters())
    loss_of(model).backward()
    hold_masks_(optimizer)  # in the middle of an accumulation
    assert_held(masks)
    for _ in range(2):
        loss_of(model).backward()
        assert_held(masks)
    model[0].weight.grad = torch.full_like(model[0].weight, torch.nan).where(~masks[model[0].weight], torch.ones(()))
    model[2].weight.grad = None
    before = model[2].weight.detach().clone()
    optimizer.step()
    assert_held({model[0].weight: masks[model[0].weight]}, optimizer)
    assert torch.equal(model[2].weight, before)


def test_grad_scaler_skips_a_step_only_for_kept_gradients(held):
    model, masks, optimizer = held
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    where_inf = [~masks[model[0].weight], torch.zeros(()).bool(), masks[model[0].weight]]
    model[0].weight.register_hook(lambda grad: grad.masked_fill(where_inf[0], torch.inf))
    skipped = []
    while where_inf:
        before = model[2].weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(torch.equal(model[2].weight, before))
        assert torch.equal(model[0].weight != 0, masks[model[0].weight])
        where_inf.pop(0)
    assert skipped == [False, False, True]


def test_a_frozen_parameter_is_held_when_it_is_trained_later():
    model = pruned_model()
    masks, optimizer = masks_of(model), adamw(model.parameters())
    model[0].weight.requires_grad_(False)
    hold_masks_(optimizer)
    assert not model[0].weight.requires_grad
    before = model[0].weight.detach().clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, before)
    assert_held({model[2].weight: masks[model[2].weight]}, optimizer)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, 2)
    assert_held(masks, optimizer)


def test_a_step_with_a_closure():
    model = pruned_model()
    masks, optimizer = masks_of(model), optim.LBFGS(model.parameters(), lr=0.1)
    hold_masks_(optimizer)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        assert_held(masks, optimizer)


# ------------------------------------------------------------------------------------------- compiled and replaced


@pytest.mark.parametrize(
    "name", ["AdamW", pytest.param("SGD, momentum", marks=pytest.mark.slow), "Muon", "ProxOptimizer"]
)
def test_compiled_steps_before_and_after_the_masks_are_held(name, caplog):
    torch._dynamo.reset()  # all optimizers share the code of `step`, which is compiled only a few times
    model = pruned_model()
    masks, saved = masks_of(model), copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS[name](model.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(5):
        optimizer.zero_grad()
        loss_of(model).backward()
        step()
        if number == 1:  # after a step was compiled without the hooks
            model.load_state_dict(saved)
            handle = hold_masks_(optimizer)
        if number >= 1:
            assert_held(masks, optimizer)
    handle.remove()
    loss_of(model).backward()
    step()
    assert name == "ProxOptimizer" or (model[0].weight != 0).all()
    assert "recompile_limit" not in caplog.text


@pytest.mark.parametrize("kind", ["held", "ProxOptimizer"])
def test_a_compiled_step_does_not_recompile_for_every_layer(kind, caplog):
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)])  # torch compiles one function 8 times
    with torch.no_grad():
        for layer in model:
            layer.weight.masked_fill_(~nm_mask(layer.weight.abs()), 0)
    masks, optimizer = masks_of(model), optim.SGD(model.parameters(), lr=1e-3)
    if kind == "held":
        hold_masks_(optimizer)
    else:
        optimizer, masks = ProxOptimizer(optimizer, reg_lambda=0.1), {}
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        step()
        assert_held(masks, optimizer)
    assert "recompile_limit" not in caplog.text


def test_a_compiled_model(held):
    model, masks, optimizer = held
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled(torch.randn(4, 8)).square().mean().backward()
        assert_held(masks)
        optimizer.step()
        assert_held(masks, optimizer)


def test_replaced_and_added_parameters_are_held_and_old_ones_are_forgotten():
    model = pruned_model()
    optimizer = adamw([model[0].weight])
    handle = hold_masks_(optimizer)
    old = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())  # as accelerate does for FSDP2
    optimizer.param_groups[0]["params"] = [model[0].weight]
    optimizer.add_param_group({"params": [model[2].weight, model[2].bias]})
    masks = masks_of(model)
    train(model, optimizer, 2)
    assert_held(masks, optimizer)
    assert repr(handle) == "HeldMasks(2 of 3 parameters are held)"
    gc.collect()
    assert old() is None
    weight = weakref.ref(model[0].weight)
    del model, optimizer, handle, masks
    gc.collect()
    assert weight() is None, "nothing keeps the model alive"


def test_sparse_gradients_are_held():
    layer = torch.nn.Embedding(6, 8, sparse=True)
    mask = nm_mask(layer.weight.detach().abs())
    layer.weight.data *= mask
    optimizer = optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    hold_masks_(optimizer)
    for _ in range(2):
        before = layer.weight.detach().clone()
        layer(torch.tensor([1, 2, 1])).sum().backward()
        optimizer.step()
        assert torch.equal(layer.weight != before, mask & torch.tensor([[0], [1], [1], [0], [0], [0]]).bool())
        assert torch.equal(layer.weight != 0, mask)
