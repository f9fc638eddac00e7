"""hold_masks_: which parameters are held with which pattern, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from training import assert_held, flat, masks_of, pruned_model, tiny_model, train

from proxsparse import NMPattern, hold_masks_, nm_mask

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")

adamw = partial(optim.AdamW, lr=0.01, weight_decay=0.1)


def test_zeros_that_could_be_kept_are_trained_and_the_result_is_nm():
    model = pruned_model()
    with torch.no_grad():
        model[0].weight[:9, :4] = torch.tensor([0.0, 0.5, 0.0, 0.0])
        model[0].weight[0, 4:] = 0
    handle = hold_masks_(optimizer := adamw(model.parameters()))
    pruned = ~handle.masks[model[0].weight]
    assert pruned[:9, :4].tolist() == [[False, False, True, True]] * 9
    assert pruned[0, 4:].tolist() == [False, False, True, True]
    train(model, optimizer, 3)
    assert torch.equal(model[0].weight == 0, pruned)


def test_what_is_not_held():
    """Dense weights, biases of zeros, LoRA's B, weights without whole blocks, an embedding with zero rows, integers."""
    free = [torch.zeros(8), torch.zeros(8, 4), torch.randn(8, 8), torch.zeros(4, 6), torch.eye(3)]
    free += [torch.randn(9, 8) * (torch.arange(9) < 2)[:, None]]
    model = pruned_model()
    free = [nn.Parameter(tensor) for tensor in free] + [nn.Parameter(torch.zeros(4, 4).int(), requires_grad=False)]
    handle = hold_masks_(adamw([*free, model[0].weight]))
    assert [mask is not None for mask in handle.masks.values()] == [False] * 7 + [True]


def two_patterns() -> nn.Sequential:
    """3:4 is the largest pattern of the model."""
    model = pruned_model("3:4")
    model[0].load_state_dict(pruned_model("2:4")[0].state_dict())
    return model


@pytest.mark.parametrize("largest", [None, "8:10"])
def test_each_parameter_keeps_its_own_pattern(largest):
    """Whatever the largest is, blocks of 4, 6, 8 and 10 do not lie in each other."""
    patterns = ["2:4", "4:6", "6:8", "8:10", "1:4", "2:8", "4:8", "8:16", "3:4"]
    model = nn.Sequential(*[nn.Linear(240, 240) for _ in patterns])
    with torch.no_grad():
        for layer, pattern in zip(model, patterns, strict=True):
            layer.weight.masked_fill_(~nm_mask(layer.weight.abs(), pattern), 0)
    masks, optimizer = masks_of(model), optim.SGD(model.parameters(), lr=1e-3)
    handle = hold_masks_(optimizer, largest)
    assert [torch.equal(handle.masks[weight], mask) for weight, mask in masks.items()] == [True] * len(patterns)
    model(torch.randn(4, 240)).sum().backward()
    optimizer.step()
    assert_held(masks, optimizer)


@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "8:10"])
@pytest.mark.parametrize("given", [False, True])
def test_kept_weights_that_are_zero_too_change_no_pattern(pattern, given):
    model = nn.Sequential(nn.Linear(240, 240))
    with torch.no_grad():
        mask = nm_mask(model[0].weight.abs(), pattern)
        zeros = torch.rand(240, 240) < 0.2
        model[0].weight.masked_fill_(~mask | zeros, 0)
    handle = hold_masks_(optim.SGD(model.parameters()), pattern if given else None)
    found = handle.masks[model[0].weight]
    assert NMPattern.parse(pattern).is_mask(found)
    assert found[mask & ~zeros].all()


@pytest.mark.parametrize("pattern", ["2:4", "6:8", "3:4", "1:4", "1:16", "2:8", "8:16", "4:10"])
def test_rows_of_zeros_change_no_pattern(pattern):
    """Those of unused neurons: 60% of the rows."""
    weight = torch.randn(240, 240)
    mask = nm_mask(weight.abs(), pattern)
    sparse = nn.Parameter(weight * mask * (torch.arange(240) % 5 < 2)[:, None])
    found = hold_masks_(adamw([sparse])).masks[sparse]
    assert torch.equal(found[::5], mask[::5])
    assert NMPattern.parse(pattern).is_mask(found)


@pytest.mark.parametrize("density", [0.5, 0.8])
def test_unstructured_zeros_are_no_pattern(density):
    model = pruned_model()
    free = nn.Parameter(torch.randn(240, 240) * (torch.rand(240, 240) < density))
    assert hold_masks_(adamw([free, *model.parameters()])).masks[free] is None


@pytest.mark.parametrize("pattern", ["8:32", "3:32", "2:32", "4:64", "1:64", "1:12", "unstructured"])
def test_pruned_weights_whose_pattern_is_not_clear_are_not_trained(pattern):
    weight = torch.randn(192, 192)
    kept = torch.rand(192, 192) < 0.2 if pattern == "unstructured" else nm_mask(weight.abs(), pattern)
    sparse = nn.Parameter(weight * kept)
    with pytest.raises(ValueError, match=r"is sparse, but its pattern is not clear from its zeros; give its"):
        hold_masks_(adamw([sparse, *pruned_model().parameters()]))
    if pattern != "unstructured":
        assert torch.equal(hold_masks_(adamw([sparse]), pattern).masks[sparse], kept)


def damaged(wrong: int, nonzeros: int) -> nn.Sequential:
    """A few blocks with too many nonzeros must not make the layer dense, or 3:4."""
    model = pruned_model()
    model[0].weight.data.view(-1, 4)[:wrong, :nonzeros] = 1.0
    return model


DAMAGED = r"parameter 0 of group 0, of shape \[24, 8\], is not quite 2:4: {} of 48 blocks have more than 2"


@pytest.mark.parametrize(
    ("parameters", "pattern", "message"),
    [
        (lambda: tiny_model().parameters(), "2:4", "no parameter of this AdamW is 2:4: the model is dense; prune it"),
        (lambda: tiny_model().parameters(), None, "no parameter of this AdamW is pruned: the model is dense; prune it"),
        (lambda: pruned_model().parameters(), "1:4", r'is 2:4, not 1:4; pass pattern="2:4"'),
        (lambda: pruned_model("3:4").named_parameters(), "2:4", r"parameter 0.weight, of shape \[24, 8\], is 3:4, not"),
        (lambda: two_patterns().parameters(), "2:4", r'parameter 2 .* shape \[4, 24\], is 3:4, .*; pass pattern="3:4"'),
        (lambda: pruned_model().parameters(), "4:2", "pattern 4:2"),
        (lambda: [flat()], "2:4", r"FSDP1.*fully_shard"),
        (lambda: damaged(1, 3).parameters(), "2:4", DAMAGED.format(1)),
        (lambda: damaged(1, 3).parameters(), None, DAMAGED.format(1)),
        (lambda: damaged(23, 4).parameters(), "2:4", DAMAGED.format(23)),
    ],
)
def test_refusals_hold_nothing(parameters, pattern, message):
    optimizer = adamw(parameters())
    with pytest.raises(ValueError, match=message):
        hold_masks_(optimizer, pattern)
    assert not optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in optimizer.param_groups[0]["params"])


def test_a_model_is_not_an_optimizer():
    with pytest.raises(TypeError, match=r"optimizer is a Sequential; pass a torch.optim.Optimizer"):
        hold_masks_(pruned_model())
