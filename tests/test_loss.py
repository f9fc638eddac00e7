"""The training loss by definition: text, divergence from the teacher, error of the hidden states; its gradient."""

import copy
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from tiny_models import PADDED, tiny_model

from proxsparse import prune_
from proxsparse.errors import InputError
from proxsparse.models.layers import prunable_layers
from proxsparse.training import loss
from proxsparse.training.learnable_layer import dense, make_learnable_layers
from proxsparse.training.loop import switch_checkpointing
from proxsparse.training.loss import hidden_error, rows_at_a_time, training_loss

INPUTS = {name: PADDED[name] for name in ("input_ids", "attention_mask")}


@pytest.fixture
def teacher():
    return tiny_model("llama", num_hidden_layers=3)


@pytest.fixture
def masked(teacher):
    """A copy of the teacher under its masks, and its learnable layers."""
    model = copy.deepcopy(teacher)
    layers = prunable_layers(model)
    pretrained = {f"{name}.weight": layer.weight.detach().clone() for name, layer in layers.items()}
    return model, make_learnable_layers(layers, pretrained, {}, dict.fromkeys(layers, "2:4"), True)


def loss_of(model, learned, distill: float, match_hidden: float) -> torch.Tensor:
    """The loss on `PADDED` with the dense model as the teacher."""
    return training_loss(model, PADDED, partial(dense, model, learned.values()), distill, match_hidden)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 2)])
def test_without_a_teacher_it_is_the_models_own_loss(teacher, rows):
    batch = {name: tensor[rows] for name, tensor in PADDED.items()}
    torch.testing.assert_close(training_loss(teacher, batch), teacher(**batch).loss)


@pytest.mark.parametrize("distill", [0.3, 1.0])
@pytest.mark.parametrize("at_once", [1, 3, 256])
def test_the_divergence_is_that_of_the_whole_distribution(teacher, distill, at_once, monkeypatch):
    monkeypatch.setattr("proxsparse.training.loss.ROWS", at_once)
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
    losses = []
    for row, position in ((0, 0), (0, 1), (0, 2), (1, 0)):  # the positions whose next token is not padding
        q, p = (one(**INPUTS).logits[row, position].double().softmax(-1) for one in (teacher, model))
        divergence = (q * (q / p).log()).sum()
        losses.append((1 - distill) * -p[PADDED["labels"][row, position + 1]].log() + distill * divergence)
    expected = torch.stack(losses).mean()
    gradient = torch.autograd.grad(expected, model.lm_head.weight)[0]
    found = training_loss(model, PADDED, lambda: nullcontext(teacher), distill)
    found.backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.lm_head.weight.grad, gradient, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_gpu_gets_as_many_rows_at_a_time_as_fit():
    rows = rows_at_a_time(True, 49152)
    assert rows > loss.ROWS
    assert rows * 4 * 49152 <= loss.GPU_BYTES < (rows + 1) * 4 * 49152
    assert rows_at_a_time(True, 10**8) == rows_at_a_time(False, 49152) == loss.ROWS


def test_the_error_is_the_mean_of_the_logarithms_of_one_plus_the_relative_errors_of_the_real_tokens():
    states, wanted = (tuple(torch.randn(2, 4, 8) for _ in range(3)) for _ in range(2))
    real = PADDED["attention_mask"].bool()
    tokens = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    errors = [
        math.log(1 + (own[place] - other[place]).double().norm() ** 2 / other[place].double().norm() ** 2)
        for own, other in zip(states, wanted, strict=True)
        for place in tokens
    ]
    torch.testing.assert_close(hidden_error(states, wanted, real), torch.tensor(sum(errors) / 18))


@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_it_adds_the_error_of_every_block_but_the_last_to_the_calibration_loss(distill, teacher, masked):
    model, learned = masked
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own, wanted = (one(**INPUTS, output_hidden_states=True).hidden_states[1:3] for one in (model, teacher))
    error = hidden_error(own, wanted, PADDED["attention_mask"].bool())
    assert error > 0.01
    without = training_loss(model, PADDED, lambda: nullcontext(teacher), distill)
    torch.testing.assert_close(loss_of(model, learned, distill, 7.0), without + 7 * error)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())  # masked again


def test_the_teacher_is_the_dense_model_without_dropout(teacher, masked):
    model, learned = masked
    model.train()
    with dense(model, learned.values()) as whole:
        assert all(map(torch.equal, whole.parameters(), teacher.parameters()))
    assert not all(map(torch.equal, model.parameters(), teacher.parameters()))
    loss_of(model, learned, 0.0, 1.0)
    assert model.training


def test_padding_whose_state_is_zero_has_no_effect():
    real = PADDED["attention_mask"].bool()
    target = torch.randn(2, 4, 8)
    zeros = target.where(real[..., None], 0)
    state = torch.randn(2, 4, 8, requires_grad=True)
    error = hidden_error((state,), (zeros,), real)
    error.backward()
    assert torch.equal(error, hidden_error((state,), (target,), real))
    assert state.grad.isfinite().all()
    assert not state.grad[~real].any()


def test_the_error_of_a_block_trains_only_the_blocks_before(masked):
    model, learned = masked
    states = model(**INPUTS, output_hidden_states=True).hidden_states[2:3]  # after the second block
    hidden_error(states, [torch.randn_like(states[0])], PADDED["attention_mask"].bool()).backward()
    for name, one in learned.items():
        gradient = one.layer.weight.grad
        assert gradient is None if "layers.2" in name else gradient.abs().sum() > 0, name


def test_its_gradient_is_the_same_with_gradient_checkpointing(masked):
    gradients = []
    for checkpointing in (False, True):
        model, learned = copy.deepcopy(masked)
        model.train()
        if checkpointing:
            switch_checkpointing(model, "enable", {"use_reentrant": False})
        loss_of(model, learned, 0.5, 7.0).backward()
        gradients.append({name: one.layer.weight.grad for name, one in learned.items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])
        assert gradient.abs().sum() > 0


def test_one_block_is_refused():
    model = tiny_model("llama", num_hidden_layers=1)
    with pytest.raises(InputError, match="match_hidden: the model has one decoder block"):
        prune_(model, "proxsparse", [PADDED], match_hidden=1.0)
