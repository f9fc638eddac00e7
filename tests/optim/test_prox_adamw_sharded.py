"""ProxAdamW on DTensors: FSDP2's fully_shard, distributed checkpoints, and shardings that would cut blocks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from proxsparse import ProxAdamW

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore:.* not on the cpp backend"),
]

INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
SETUPS = {
    "float32": (torch.float32, {}),
    "master": (torch.bfloat16, {"master_weights": True}),
    "stochastic": (torch.bfloat16, {"stochastic_rounding": True, "moment_dtype": torch.bfloat16}),
}
each_setup = pytest.mark.parametrize(("dtype", "setup"), SETUPS.values(), ids=SETUPS)


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


def tiny_model(dtype: torch.dtype, mesh=None) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).to(dtype)
    return model if mesh is None else fully_shard(model, mesh=mesh)


def make_optimizer(model: nn.Module, **setup) -> ProxAdamW:
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.3, frozen_lambda=0.2, **setup)
    optimizer.set_metric(model[0].weight, torch.linspace(0.5, 2, 8))
    return optimizer


def train(model: nn.Module, optimizer: ProxAdamW, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(INPUTS.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().clone() for p in full]  # full_tensor shares memory where one process holds all


@each_setup
def test_fully_shard_gives_the_same_weights(one_process, dtype, setup):
    sharded, plain = tiny_model(dtype, one_process), tiny_model(dtype)
    assert isinstance(sharded[0].weight, DTensor)
    optimizer = make_optimizer(sharded, **setup)
    train(sharded, optimizer, 4)
    train(plain, make_optimizer(plain, **setup), 4)
    for w, expected in zip(weights(sharded), weights(plain), strict=True):
        torch.testing.assert_close(w, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    state = optimizer.state[sharded[0].weight]
    assert all(isinstance(value, DTensor) for key, value in state.items() if key != "step"), "as the weight"


@each_setup
def test_distributed_checkpoint_resumes_bit_identically(one_process, tmp_path, dtype, setup):
    model = tiny_model(dtype, one_process)
    optimizer = make_optimizer(model, seed=2**63 + 1, **setup)
    train(model, optimizer, 3)
    saved_weights = weights(model)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "checkpoint")
    train(model, optimizer, 2)

    resumed = tiny_model(dtype, one_process)
    with torch.no_grad():
        for parameter, value in zip(resumed.parameters(), saved_weights, strict=True):
            parameter.to_local().copy_(value)
    other = make_optimizer(resumed, **setup)
    state = {"optimizer": get_optimizer_state_dict(resumed, other)}  # runs a step at lr = 0 to create the state
    for parameter, value in zip(weights(resumed), saved_weights, strict=True):
        assert torch.equal(parameter, value)
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    set_optimizer_state_dict(resumed, other, state["optimizer"])
    assert other.param_groups[0]["prox_step"] == 3
    train(resumed, other, 2)
    for w, expected in zip(weights(resumed), weights(model), strict=True):
        assert torch.equal(w, expected)
    for key, value in optimizer.state[model[0].weight].items():
        assert other.state[resumed[0].weight][key].dtype == value.dtype, key


def sharded_weight(mesh, placement, local_shape) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.randn(local_shape), mesh, [placement], run_check=False))


def test_a_sharding_that_cuts_blocks_is_refused(two_processes):
    weight = sharded_weight(two_processes, Shard(1), (4, 6))  # 12 input features: 6 a process
    with pytest.raises(ValueError, match=r"\[4, 12\]: 2 shards along the last .* cut its 2:4 blocks.*fully_shard"):
        ProxAdamW([weight], reg_lambda=0.1)
    ProxAdamW([weight], reg_lambda=0.1, pattern="1:2")


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
        ProxAdamW([parameter], lr=0.01, reg_lambda=0.5).step()
    assert torch.equal(weight.to_local(), plain)
    assert before.numel() == 0 or not torch.equal(weight.to_local(), before)


def test_a_gradient_placed_in_another_way_is_refused(two_processes):
    weight = sharded_weight(two_processes, Replicate(), (3, 8))
    optimizer = ProxAdamW([weight], lr=0.01, reg_lambda=0.5)
    weight.grad = DTensor.from_local(torch.ones(3, 8), two_processes, [Partial()], run_check=False)
    before = weight.to_local().detach().clone()
    with pytest.raises(ValueError, match=r"\[3, 8\] is placed .*Replicate.* gradient .*Partial.*redistribute"):
        optimizer.step()
    assert torch.equal(weight.to_local(), before)
