"""MaskLLM: its distribution and schedules against the stated formulas, and whole runs on a tiny model."""

import functools
import math
from itertools import combinations

import pytest
import tiny_models
import torch

from proxsparse import NMPattern, prune_
from proxsparse.errors import InputError
from proxsparse.methods import maskllm
from proxsparse.methods.block_masks import block_masks

FAST = {"learning_rate": 0.02, "final_learning_rate": 0.002}  # few steps: each must move the logits further


@functools.cache
def memorised():
    """The state of a tiny model that has learned one text by heart, and the text as a batch."""
    model = tiny_models.tiny_model("llama")
    ids = torch.randint(3, 96, (2, 48), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return model.state_dict(), batch


@pytest.fixture
def learned_model(tiny_model):
    """A new copy of that model."""

    def build():
        (model := tiny_model()).load_state_dict(memorised()[0])
        return model

    return build


def same(masks, others):
    return all(torch.equal(mask, others[name]) for name, mask in masks.items())


@torch.no_grad()
def loss_of(model, batch):
    return model(**batch).loss.item()


@pytest.fixture
def recorded(monkeypatch):
    """recorded(owner, name) -> the list of (arguments, result) of each call of that function from now on."""

    def watch(owner, name):
        calls, function = [], getattr(owner, name)

        def record(*arguments, **keywords):
            calls.append((arguments, function(*arguments, **keywords)))
            return calls[-1][1]

        monkeypatch.setattr(owner, name, record)
        return calls

    return watch


def test_the_learned_mask_beats_the_magnitude_mask(learned_model):
    batch, (model, magnitude, prior) = memorised()[1], (learned_model() for _ in range(3))
    dense = loss_of(model, batch)
    prune_(magnitude, "magnitude")
    prune_(prior, "sparsegpt", [batch], update_weights=False)
    prune_(model, "maskllm", [batch], epochs=60, **FAST)
    assert dense < 0.1
    assert loss_of(model, batch) < 0.5 * loss_of(magnitude, batch)
    assert loss_of(model, batch) < 0.5 * loss_of(prior, batch)


@pytest.mark.parametrize("prior", ["magnitude", "wanda", "sparsegpt"])
def test_without_learning_the_prior_stays(prior, learned_model):
    batch = memorised()[1]
    still = {"learning_rate": 0.0, "final_learning_rate": 0.0, "prior_strength": 100.0}
    masks = prune_(learned_model(), "maskllm", [batch], prior=prior, **still)
    options = {"update_weights": False} if prior == "sparsegpt" else {}
    assert same(prune_(learned_model(), prior, [batch], **options), masks)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:4", "4:8"])
def test_the_prior_adds_its_overlap_in_deviations(pattern):
    pattern = NMPattern.parse(pattern)
    choices, generator = block_masks(pattern), torch.Generator().manual_seed(0)
    prior = choices[torch.randint(len(choices), (64, 4), generator=generator)].flatten(-2)
    logits = maskllm.initial_logits(torch.zeros(64, 4 * pattern.m), choices, generator)
    before = logits.detach().clone()
    assert before.std().item() == pytest.approx(0.01, rel=0.1)
    with torch.no_grad():
        maskllm.add_prior_(logits, prior, choices, 3.0)
    kept = list(combinations(range(pattern.m), pattern.n))
    for row, block, k in [(0, 0, 0), (5, 1, len(kept) - 1), (63, 3, len(kept) // 2)]:
        overlap = prior[row, block * pattern.m + torch.tensor(kept[k])].sum()
        step = (overlap - pattern.n**2 / pattern.m) * 3 * before.std()
        torch.testing.assert_close((logits - before)[row, block, k], step, rtol=1e-4, atol=1e-6)


def test_logits_follow_the_stated_distribution():
    """P(mask_k is the largest) = softmax(scale * logits)_k, for any tau: the Gumbel-max trick."""
    choices, generator = block_masks(NMPattern(2, 4)), torch.Generator().manual_seed(0)
    logits = torch.tensor([0.01, 0.0, -0.02, 0.0, 0.015, 0.005]).expand(20_000, 1, 6)
    masks = maskllm.soft_weight(torch.ones(20_000, 4), logits, choices, 100.0, 1e-4, generator)
    expected = (100 * logits[0, 0]).softmax(0)
    found = torch.stack([(masks.round() == choice).all(1).float().mean() for choice in choices])
    torch.testing.assert_close(found, expected, rtol=0, atol=0.015)


def test_a_soft_mask_keeps_n_weights_on_average_and_has_gradients_also_under_autocast():
    choices = block_masks(NMPattern(2, 4))
    logits = maskllm.initial_logits(torch.zeros(8, 12), choices, torch.Generator().manual_seed(0))
    weight = torch.ones(8, 12, dtype=torch.bfloat16)
    draw = lambda: maskllm.soft_weight(  # noqa: E731
        weight, logits, choices, 100.0, 4.0, torch.Generator().manual_seed(0)
    )
    soft = draw()
    assert soft.dtype == torch.bfloat16
    torch.testing.assert_close(soft.float().unflatten(1, (3, 4)).sum(-1), torch.full((8, 3), 2.0), rtol=0.02, atol=0)
    soft.square().sum().backward()
    assert (logits.grad != 0).all()
    weight = weight.float()
    expected = draw()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(draw(), expected)


def test_schedules(learned_model, recorded, monkeypatch):
    batch, rates, calls = memorised()[1], [], recorded(maskllm, "soft_weight")
    step = torch.optim.AdamW.step

    def record(optimizer):
        rates.append(optimizer.param_groups[0]["lr"])
        assert optimizer.defaults["betas"] == (0.9, 0.95)
        assert (optimizer.defaults["eps"], optimizer.defaults["weight_decay"]) == (1e-5, 0.1)
        return step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    prune_(learned_model(), "maskllm", [batch] * 2, epochs=4, prior="none", include=[r"layers\.1\.mlp\.up_proj"])
    times = [t / 8 for t in range(8)]
    scales, taus = zip(*[arguments[3:5] for arguments, _ in calls], strict=True)
    assert scales == pytest.approx([100 + 400 * t for t in times])
    assert taus == pytest.approx([4 - 3.95 * t for t in times])
    assert rates == pytest.approx([5e-5 + 4.5e-4 * (1 + math.cos(math.pi * t)) / 2 for t in times])


def test_each_step_has_its_own_gradient_and_the_regulariser_fades_out(learned_model, recorded, monkeypatch):
    bonus, backward = [], torch.Tensor.backward
    norms, losses = recorded(maskllm, "squared_norm"), recorded(maskllm, "language_loss")

    def record_backward(objective, **keywords):
        assert all(logits.grad is None for logits in keywords["inputs"])  # nothing left of the last step
        bonus.append((losses[-1][1] - objective).item())
        backward(objective, **keywords)

    monkeypatch.setattr(torch.Tensor, "backward", record_backward)
    prune_(learned_model(), "maskllm", [memorised()[1]], epochs=4, prior="none", weight_reg=0.1)
    expected = [0.1 * (1 - t / 4) * norm.item() for t, (_, norm) in enumerate(norms)]
    assert bonus == pytest.approx(expected, rel=1e-4)


def test_the_gradient_is_clipped(learned_model):
    batch, settings = memorised()[1], {"epochs": 3, "prior": "none", "weight_decay": 0.0, **FAST}
    still, clipped, free = (
        prune_(learned_model(), "maskllm", [batch], **settings, **options)
        for options in ({"max_grad_norm": 0.0}, {"max_grad_norm": 1e-9}, {})
    )
    assert same(still, clipped)
    assert not same(still, free)


def test_a_loss_that_is_not_finite(tiny_model, batches):
    model = tiny_model()
    model.lm_head.weight.data[0] = 3e38  # finite, but the logits overflow
    with pytest.raises(InputError, match=r"step 1 of 3: loss (nan|inf), .*lower learning_rate"):
        prune_(model, "maskllm", batches, prior="none")
    words = r"step 1 of 3: loss \d.*, gradient norm nan; "
    with pytest.raises(InputError, match=words):
        prune_(tiny_model(), "maskllm", batches, prior="none", weight_reg=1e300)
