"""Both optimizers on DTensors: FSDP2's fully_shard, distributed checkpoints, and shardings that would cut blocks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import assert_same, each_optimizer, each_setup, tiny_model, train, weights, with_everything

from proxsparse import ProxAdamW

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore:.* not on the cpp backend"),
]


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def two_processes():
    """A mesh of two of which only this one exists: it can place tensors but not communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@each_setup
def test_fully_shard_gives_the_same_weights_and_checkpoints_resume_bit_for_bit(one_process, tmp_path, dtype, make):
    model, plain = fully_shard(tiny_model(dtype=dtype), mesh=one_process), tiny_model(dtype=dtype)
    optimizer = with_everything(make, model)
    optimizer.param_groups[0]["seed"] = 2**63 + 1  # does not fit int64; ProxOptimizer ignores it
    twin = with_everything(make, plain)
    twin.param_groups[0]["seed"] = 2**63 + 1
    train(model, optimizer, 3)
    train(plain, twin, 3)
    saved = weights(model)
    torch.testing.assert_close(saved, weights(plain), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    state = optimizer.state[model[0].weight]
    assert ("pretrained" in state) == isinstance(optimizer, ProxAdamW)
    assert all(isinstance(value, DTensor) for key, value in state.items() if key != "step"), "placed as the weight"
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "checkpoint")
    train(model, optimizer, 2)

    resumed = fully_shard(tiny_model(dtype=dtype), mesh=one_process)
    with torch.no_grad():
        for parameter, value in zip(resumed.parameters(), saved, strict=True):
            parameter.to_local().copy_(value)
    other = with_everything(make, resumed)
    other.param_groups[0]["seed"] = 0
    state = {"optimizer": get_optimizer_state_dict(resumed, other)}  # runs a step at lr = 0 to create the state
    assert_same(weights(resumed), saved)
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    set_optimizer_state_dict(resumed, other, state["optimizer"])
    assert other.param_groups[0]["prox_step"] == 3
    train(resumed, other, 2)
    assert_same(weights(resumed), weights(model))
    for key, value in optimizer.state[model[0].weight].items():
        assert other.state[resumed[0].weight][key].dtype == value.dtype, key


def sharded_weight(mesh, placement, local_shape) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.randn(local_shape), mesh, [placement], run_check=False))


@each_optimizer
def test_shardings_that_cut_blocks_are_refused(two_processes, make):
    weight = sharded_weight(two_processes, Shard(1), (4, 6))  # 12 input features: 6 a process
    with pytest.raises(ValueError, match=r"\[4, 12\]: 2 shards along the last .* split its 2:4 blocks.*fully_shard"):
        make([weight], reg_lambda=0.1)
    make([weight], reg_lambda=0.1, pattern="1:2")


@pytest.mark.parametrize(
    ("placement", "local_shape"),
    [(Shard(0), (3, 12)), (Shard(0), (0, 12)), (Shard(1), (3, 8)), (Replicate(), (3, 12))],
    ids=["rows", "no rows here", "whole blocks", "replicated"],
)
@each_optimizer
def test_shardings_that_keep_blocks_step_on_the_local_part(two_processes, make, placement, local_shape):
    """Of two weights, the second with rows on every process."""
    weights = [sharded_weight(two_processes, *local) for local in ((placement, local_shape), (Shard(0), (2, 8)))]
    before = [weight.to_local().detach().clone() for weight in weights]
    plain = [nn.Parameter(values.clone()) for values in before]
    for parameters in (weights, plain):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = make(parameters, lr=0.01, reg_lambda=0.5)
        with CommDebugMode() as communication:
            optimizer.step()
        assert not communication.get_total_counts(), "the step communicates"
    for weight, expected, values in zip(weights, plain, before, strict=True):
        assert torch.equal(weight.to_local(), expected)
        assert values.numel() == 0 or not torch.equal(weight.to_local(), values)


def test_a_gradient_with_another_placement_is_refused(two_processes):
    weight = sharded_weight(two_processes, Replicate(), (3, 8))
    optimizer = ProxAdamW([weight], lr=0.01, reg_lambda=0.5)
    weight.grad = DTensor.from_local(torch.ones(3, 8), two_processes, [Partial()], run_check=False)
    before = weight.to_local().detach().clone()
    with pytest.raises(ValueError, match=r"\[3, 8\] has placements .*Replicate.* gradient .*Partial.*redistribute"):
        optimizer.step()
    assert torch.equal(weight.to_local(), before)
