"""ProxOptimizer on DTensors: FSDP2's fully_shard, distributed checkpoints, and shardings that would cut blocks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

from proxsparse.optim import ProxOptimizer

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore:prox_nm_. not on the cpp backend"),
]

INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def two_processes():
    """A mesh of two of which only this one exists: enough to place tensors, not to communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def tiny_model(mesh=None) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    return model if mesh is None else fully_shard(model, mesh=mesh)


def make_optimizer(model: nn.Module) -> ProxOptimizer:
    optimizer = ProxOptimizer(AdamW(model.parameters(), lr=0.01), 0.3, frozen_lambda=0.2)
    optimizer.set_metric(model[0].weight, torch.linspace(0.5, 2, 8))
    return optimizer


def train(model: nn.Module, optimizer: ProxOptimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().clone() for p in full]  # full_tensor shares memory where one process holds all


def test_fully_shard_gives_the_same_weights(one_process):
    sharded, plain = tiny_model(one_process), tiny_model()
    assert isinstance(sharded[0].weight, DTensor)
    optimizer = make_optimizer(sharded)
    train(sharded, optimizer, 4)
    train(plain, make_optimizer(plain), 4)
    for w, expected in zip(weights(sharded), weights(plain), strict=True):
        torch.testing.assert_close(w, expected, rtol=1e-6, atol=1e-7)
    assert isinstance(optimizer.state[sharded[0].weight]["pretrained"], DTensor), "W0 is sharded like the weight"


def test_distributed_checkpoint_resumes_bit_identically(one_process, tmp_path):
    model = tiny_model(one_process)
    optimizer = make_optimizer(model)
    train(model, optimizer, 3)
    saved_weights = weights(model)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "checkpoint")
    train(model, optimizer, 2)

    resumed = tiny_model(one_process)
    with torch.no_grad():
        for parameter, value in zip(resumed.parameters(), saved_weights, strict=True):
            parameter.to_local().copy_(value)
    other = make_optimizer(resumed)
    state = {"optimizer": get_optimizer_state_dict(resumed, other)}  # runs a step at lr = 0 to create the state
    for parameter, value in zip(weights(resumed), saved_weights, strict=True):
        assert torch.equal(parameter, value)
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    set_optimizer_state_dict(resumed, other, state["optimizer"])
    assert other.param_groups[0]["prox_step"] == 3
    train(resumed, other, 2)
    for w, expected in zip(weights(resumed), weights(model), strict=True):
        assert torch.equal(w, expected)


def sharded_weight(mesh, placement, local_shape) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.randn(local_shape), mesh, [placement], run_check=False))


def test_a_sharding_that_cuts_blocks_is_refused(two_processes):
    weight = sharded_weight(two_processes, Shard(1), (4, 6))  # 12 input features: 6 a process
    with pytest.raises(ValueError, match=r"\[4, 12\]: 2 shards along the last .* cut its 2:4 blocks.*fully_shard"):
        ProxOptimizer(AdamW([weight]), 0.1)
    ProxOptimizer(AdamW([weight]), 0.1, pattern="1:2")


@pytest.mark.parametrize(
    ("placement", "local_shape"),
    [(Shard(0), (3, 12)), (Shard(0), (0, 12)), (Shard(1), (3, 8)), (Replicate(), (3, 12))],
    ids=["rows", "no rows here", "whole blocks", "replicated"],
)
def test_shardings_that_keep_blocks_step_on_the_local_part(two_processes, placement, local_shape):
    weight = sharded_weight(two_processes, placement, local_shape)
    before = weight.to_local().detach().clone()
    plain = nn.Parameter(before.clone())
    for parameter in (weight, plain):
        parameter.grad = torch.ones_like(parameter)
        ProxOptimizer(AdamW([parameter], lr=0.01, foreach=False), 0.5).step()
    assert torch.equal(weight.to_local(), plain)
    assert before.numel() == 0 or not torch.equal(weight.to_local(), before)


def test_a_metric_across_sharded_input_features_is_refused(two_processes):
    weight = sharded_weight(two_processes, Shard(1), (4, 8))
    with pytest.raises(ValueError, match="8 input features on this device"):
        ProxOptimizer(AdamW([weight]), 0.1).set_metric(weight, torch.ones(16))
