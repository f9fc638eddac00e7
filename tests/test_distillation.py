"""The calibration loss: the model's own without distillation, the divergence from the dense model with it."""

import pytest
import tiny_models
import torch
from torch import nn

from proxsparse.training.distillation import KEPT_TOKENS, calibration_loss, likeliest, teacher_targets

PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 2, 2]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    "labels": torch.tensor([[5, 6, 7, 8], [9, 10, -100, -100]]),
}


@pytest.fixture
def model():
    return tiny_models.tiny_model("llama")


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 2)])
def test_without_distillation_it_is_the_models_own_loss(model, rows):
    batch = {name: tensor[rows] for name, tensor in PADDED.items()}
    torch.testing.assert_close(calibration_loss(model, batch, 0.0), model(**batch).loss)


@pytest.mark.parametrize("distill", [0.3, 1.0])
def test_the_divergence_is_that_of_the_teachers_likeliest_tokens_and_the_rest(model, distill, monkeypatch):
    monkeypatch.setattr("proxsparse.training.distillation.KEPT_TOKENS", 5)
    (batch,) = teacher_targets(model, [PADDED])
    teacher = model(input_ids=PADDED["input_ids"], attention_mask=PADDED["attention_mask"]).logits.softmax(-1)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
    logits = model(input_ids=PADDED["input_ids"], attention_mask=PADDED["attention_mask"]).logits
    losses = []
    for row, position in ((0, 0), (0, 1), (0, 2), (1, 0)):  # the positions whose next token is no padding
        q, p = teacher[row, position].double(), logits[row, position].double().softmax(-1)
        top = q.topk(5).indices
        q, p_top = q[top], p[top]
        rest_q, rest_p = 1 - q.sum(), 1 - p_top.sum()
        divergence = (q * (q / p_top).log()).sum() + rest_q * (rest_q / rest_p).log()
        losses.append((1 - distill) * -p[PADDED["labels"][row, position + 1]].log() + distill * divergence)
    # the teacher's probabilities are stored in bfloat16
    torch.testing.assert_close(
        calibration_loss(model, batch, distill).double(), torch.stack(losses).mean(), rtol=5e-3, atol=5e-3
    )


def test_the_teacher_itself_has_no_divergence_and_no_gradient(model):
    (batch,) = teacher_targets(model, [PADDED])
    loss = calibration_loss(model, batch, 1.0)
    assert abs(loss.item()) < 1e-3
    loss.backward()
    own = calibration_loss(model, batch, 0.0)
    norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt()
    model.zero_grad()
    own.backward()
    assert norm < 0.02 * sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt()


def test_a_certain_teacher_is_a_label():
    logits = torch.full((1, 100), -50.0)
    logits[0, 7] = 50.0

    class Model(nn.Module):
        device = torch.device("cpu")

        def forward(self, **_inputs):
            return type("Output", (), {"logits": torch.arange(200.0).view(1, 2, 100) / 50})

    batch = {"input_ids": torch.tensor([[3, 9]]), "attention_mask": torch.ones(1, 2), "labels": torch.tensor([[3, 7]])}
    targets = likeliest(logits)
    assert targets["teacher_tokens"].shape == (1, min(KEPT_TOKENS, 100))
    torch.testing.assert_close(
        calibration_loss(Model(), batch | targets, 1.0), calibration_loss(Model(), batch, 0.0), rtol=1e-4, atol=1e-4
    )
