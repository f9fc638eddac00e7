"""The calibration loss: the model's own without distillation, the divergence from the dense model with it."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import PADDED, tiny_model

from proxsparse.training.distillation import KEPT_TOKENS, calibration_loss, most_likely, teacher_targets


@pytest.fixture
def model():
    return tiny_model("llama")


def square_norm(model) -> float:
    return sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).item()


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 2)])
def test_without_distillation_it_is_the_models_own_loss(model, rows):
    batch = {name: tensor[rows] for name, tensor in PADDED.items()}
    torch.testing.assert_close(calibration_loss(model, batch, 0.0), model(**batch).loss)


@pytest.mark.parametrize("distill", [0.3, 1.0])
def test_the_divergence_is_that_of_the_teachers_likeliest_tokens_and_the_rest(model, distill, monkeypatch):
    monkeypatch.setattr("proxsparse.training.distillation.KEPT_TOKENS", 5)
    (batch,) = teacher_targets(model, [PADDED])
    inputs = {name: PADDED[name] for name in ("input_ids", "attention_mask")}
    teacher = model(**inputs).logits.softmax(-1)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
    logits = model(**inputs).logits
    losses = []
    for row, position in ((0, 0), (0, 1), (0, 2), (1, 0)):  # the positions whose next token is not padding
        q, p = teacher[row, position].double(), logits[row, position].double().softmax(-1)
        top = q.topk(5).indices
        q, p_top = q[top], p[top]
        rest_q, rest_p = 1 - q.sum(), 1 - p_top.sum()
        divergence = (q * (q / p_top).log()).sum() + rest_q * (rest_q / rest_p).log()
        losses.append((1 - distill) * -p[PADDED["labels"][row, position + 1]].log() + distill * divergence)
    found = calibration_loss(model, batch, distill).double()
    torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=5e-3, atol=5e-3)  # the teacher is in bfloat16


def test_the_teacher_itself_has_no_divergence_and_no_gradient(model):
    (batch,) = teacher_targets(model, [PADDED])
    loss = calibration_loss(model, batch, 1.0)
    assert abs(loss.item()) < 1e-3
    loss.backward()
    divergence = square_norm(model)
    model.zero_grad()
    calibration_loss(model, batch, 0.0).backward()
    assert divergence < 0.02**2 * square_norm(model)


def test_a_certain_teacher_is_a_label():
    def model(**_inputs):
        return SimpleNamespace(logits=torch.arange(200.0).view(1, 2, 100) / 50)

    model.device = torch.device("cpu")
    logits = torch.full((1, 100), -50.0)
    logits[0, 7] = 50.0
    batch = {"input_ids": torch.tensor([[3, 9]]), "attention_mask": torch.ones(1, 2), "labels": torch.tensor([[3, 7]])}
    targets = most_likely(logits)
    assert targets["teacher_tokens"].shape == (1, min(KEPT_TOKENS, 100))
    found = calibration_loss(model, batch | targets, 1.0)
    torch.testing.assert_close(found, calibration_loss(model, batch, 0.0), rtol=1e-4, atol=1e-4)
