"""hold_masks_: what it leaves as it is, and what it refuses with one line."""

import pytest
import torch
from torch import nn
from training import pruned_model, tiny_model

from proxsparse import hold_masks_

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")


def adamw(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(("wrong", "nonzeros"), [(1, 3), (3, 4), (23, 4)])
def test_a_damaged_layer_is_refused(wrong, nonzeros):
    """A few blocks with too many nonzeros must not make the layer dense, or 3:4."""
    model = pruned_model()
    with torch.no_grad():
        model[0].weight.view(-1, 4)[:wrong, :nonzeros] = 1.0
    message = (
        rf"parameter 0 of group 0, of shape \[24, 8\], is not quite 2:4: {wrong} of its 48 blocks have more than 2"
    )
    with pytest.raises(ValueError, match=message):
        hold_masks_(optimizer := adamw(model.parameters()))
    assert not optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_what_is_not_held():
    """Dense weights, biases of zeros, LoRA's B, weights without whole blocks, an embedding with zero rows, integers."""
    free = [torch.zeros(8), torch.zeros(8, 4), torch.randn(8, 8), torch.zeros(4, 6), torch.eye(3)]
    free += [torch.randn(9, 8) * (torch.arange(9) < 2)[:, None]]
    model = pruned_model()
    free = [nn.Parameter(tensor) for tensor in free] + [nn.Parameter(torch.zeros(4, 4).int(), requires_grad=False)]
    handle = hold_masks_(adamw([*free, model[0].weight]))
    assert [mask is not None for mask in handle.masks.values()] == [False] * 7 + [True]


def test_refusals():
    model = pruned_model()
    flat = nn.Parameter(torch.ones(64))
    flat._is_flat_param = True  # how FSDP1 marks its flat parameters
    named = pruned_model("3:4").named_parameters()
    for optimizer, pattern, message in (
        (adamw(tiny_model().parameters()), "2:4", r"no parameter of this AdamW is 2:4: the model is dense; prune it"),
        (adamw(model.parameters()), "1:4", r'is 2:4, not 1:4; pass pattern="2:4"'),
        (adamw(named), "2:4", r'parameter 0.weight, of shape \[24, 8\], is 3:4, not 2:4; pass pattern="3:4"'),
        (adamw(model.parameters()), "4:2", "pattern 4:2"),
        (adamw([flat]), "2:4", r"FSDP1.*fully_shard"),
    ):
        with pytest.raises(ValueError, match=message):
            hold_masks_(optimizer, pattern)
        assert not optimizer._optimizer_step_post_hooks
        assert not any(p._post_accumulate_grad_hooks for p in optimizer.param_groups[0]["params"])
    with pytest.raises(TypeError, match=r"optimizer is a Sequential; pass a torch.optim.Optimizer"):
        hold_masks_(model)
