"""The calibration loss: the model's own without distillation, the divergence from the dense model with it."""

import pytest
import torch
from tiny_models import PADDED, tiny_model

from proxsparse.training.distillation import calibration_loss, teacher_targets


@pytest.fixture
def model():
    return tiny_model("llama")


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
