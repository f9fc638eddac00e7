"""Stochastic rounding to bfloat16: the very bits of its definition, on every backend, and right in the mean."""

import pytest
import torch

from proxsparse import reference
from proxsparse.ops import adamw_prox_

pytestmark = pytest.mark.filterwarnings("ignore:adamw_prox_. not on the cpp backend")

OP = "adamw_prox_"
SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15)
WORD = 2**32 - 1
# What makes the arithmetic of the step exact in float32, and its results far from bfloat16, in any order of operations:
# w' = w * (1 - 2^-10), exp_avg' = (exp_avg + g) / 2, exp_avg_sq' = (exp_avg_sq + g^2) / 2. The step itself is zero
# where exp_avg' is: tests of the weight set exp_avg = grad = 0.
EXACT = {"step": 1, "lr": 1.0, "betas": (0.5, 0.5), "eps": 1e-8, "weight_decay": 2.0**-10}


def mix(x: int) -> int:
    """The hash of the contract, in Python's integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def random_words(index: int, seed: int) -> tuple[int, int]:
    first = mix(mix((index & WORD) ^ (seed & WORD)) ^ (index >> 32) ^ (seed >> 32))
    return first, mix(first)


def rounded(values: torch.Tensor, bits: list[int]) -> torch.Tensor:
    """bfloat16 whose bits are the upper half of (bits of the float32 + r); -0.0 becomes 0.0."""
    words = [word & WORD for word in values.float().flatten().cpu().view(torch.int32).tolist()]
    upper = [(word + r) >> 16 for word, r in zip(words, bits, strict=True)]
    upper = [0 if half == 0x8000 else half for half in upper]
    signed = [half - 2**16 if half >= 2**15 else half for half in upper]
    return torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16).view(values.shape)


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.cpu().view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bits_are_those_of_the_definition(seed, device):
    shape = (67, 37)
    words = [random_words(index, seed) for index in range(67 * 37)]
    zero, ones = torch.zeros(shape, dtype=torch.bfloat16, device=device), torch.ones(shape, device=device)

    weight = bfloat16(*shape)
    expected = rounded(weight.float() * (1 - 2.0**-10), [first >> 16 for first, _ in words])
    weight = weight.to(device)
    adamw_prox_(weight, zero, ones * 0, ones, seed=seed, **EXACT)
    assert same_bits(weight, expected)

    grad, exp_avg, exp_avg_sq = bfloat16(*shape), bfloat16(*shape), bfloat16(*shape).square()
    mean = rounded((exp_avg.float() + grad.float()) / 2, [first & 0xFFFF for first, _ in words])
    square = (exp_avg_sq.double() + grad.double().square()) / 2
    exact = square == square.float()
    square = rounded(square.float(), [second & 0xFFFF for _, second in words])
    exp_avg, exp_avg_sq = exp_avg.to(device), exp_avg_sq.to(device)
    adamw_prox_(ones.bfloat16(), grad.to(device), exp_avg, exp_avg_sq, seed=seed, **EXACT)
    assert same_bits(exp_avg, mean)
    assert exact.float().mean() > 0.9
    assert same_bits(exp_avg_sq[exact.to(device)], square[exact])


def test_the_position_counts_through_all_dimensions_and_not_the_layout(device):
    flat = bfloat16(4 * 6 * 8).to(device)
    zero, one = torch.zeros_like(flat), torch.ones_like(flat)
    expected = flat.clone()
    adamw_prox_(expected, zero, zero.clone(), one.clone(), seed=3, **EXACT)
    for shape, strided in (((4, 6, 8), False), ((24, 8), True)):
        tensors = [tensor.clone().view(shape) for tensor in (flat, zero, zero, one)]
        tensors = [tensor.T.contiguous().T for tensor in tensors] if strided else tensors
        adamw_prox_(*tensors, seed=3, **EXACT)
        assert torch.equal(tensors[0].reshape(-1), expected)


def test_a_seed_decides_everything_and_another_one_decides_otherwise(device):
    def run(seed):
        generator = torch.Generator().manual_seed(1)
        weight, grad, exp_avg = (torch.randn(64, 64, generator=generator).bfloat16().to(device) for _ in range(3))
        exp_avg_sq = exp_avg.square()
        for step in range(1, 4):
            adamw_prox_(weight, grad, exp_avg, exp_avg_sq, step=step, lr=0.01, reg_lambda=0.3, seed=seed)
        return weight, exp_avg, exp_avg_sq

    first, again, other, negative = run(2**64 - 7), run(2**64 - 7), run(8), run(-7)
    for x, same, different, also_same in zip(first, again, other, negative, strict=True):
        assert torch.equal(x, same)
        assert torch.equal(x, also_same), "a seed counts modulo 2^64"
        assert (x != different).float().mean() > 0.2


def test_a_master_leaves_nothing_to_chance_but_the_moments(device):
    weight, grad = bfloat16(16, 32).to(device), bfloat16(16, 32).to(device)

    def run(seed):
        tensors = [weight.clone(), grad, torch.zeros_like(grad), torch.zeros_like(grad), weight.float()]
        adamw_prox_(*tensors, step=1, lr=0.01, reg_lambda=0.3, seed=seed)
        return tensors

    first, second = run(1), run(2)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[4], second[4])
    assert torch.equal(first[0], first[4].bfloat16())
    assert not torch.equal(first[2], second[2])


def test_without_a_seed_it_is_to_nearest_even(device):
    weight, grad, exp_avg = (bfloat16(8, 40).to(device) for _ in range(3))
    zero = torch.zeros_like(grad)
    expected = (weight.float() * (1 - 2.0**-10)).bfloat16(), ((exp_avg.float() + grad.float()) / 2).bfloat16()
    adamw_prox_(weight, zero, zero.clone(), zero + 1, **EXACT)
    adamw_prox_(zero + 1, grad, exp_avg, zero + 1, **EXACT)
    assert torch.equal(weight, expected[0])
    assert torch.equal(exp_avg, expected[1])


def test_only_bfloat16_is_rounded_stochastically(device):
    for dtype in (torch.float64, torch.float32, torch.float16):
        weight, grad = torch.randn(8, 16).to(device, dtype), torch.randn(8, 16).to(device, dtype)
        zero = torch.zeros_like(grad, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        results = [(weight.clone(), zero.clone(), zero.clone()) for _ in range(2)]
        for (w, exp_avg, exp_avg_sq), seed in zip(results, (None, 5), strict=True):
            adamw_prox_(w, grad, exp_avg, exp_avg_sq, step=1, lr=0.01, reg_lambda=0.3, seed=seed)
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_zeros_stay_plus_zero_and_small_weights_become_it(device):
    smallest = torch.tensor([0.0, 1.0, -1.0, 0.5]).mul(2.0**-133).bfloat16()  # 2^-133 is the smallest bfloat16
    weight = smallest.repeat(64, 16).to(device)
    zero = torch.zeros_like(weight)
    adamw_prox_(weight, zero, zero.float(), zero.float() + 1, seed=1, **EXACT | {"weight_decay": 0.75})
    assert not weight[weight == 0].signbit().any()
    assert (weight[:, ::4] == 0).all()
    if device.type == "cpu":  # GPUs may flush numbers below 2^-126 to zero
        shares = (weight != 0).float().mean(0).view(-1, 4).mean(0)
        torch.testing.assert_close(shares, torch.tensor([0.0, 0.25, 0.25, 0.0]), rtol=0, atol=0.06)


def test_a_bad_number_stays_one():
    r = torch.tensor([0, 1, 0x8000, 0xFFFF], dtype=torch.int32)
    for word in (0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, -(2**23) + 1):  # NaNs, the first two of a GPU
        x = torch.tensor([word] * 4, dtype=torch.int32).view(torch.float32)
        assert reference.stochastic_round(x, r).isnan().all()
    for infinity in (torch.inf, -torch.inf):
        x = torch.full((4,), infinity)
        assert torch.equal(reference.stochastic_round(x, r), x.bfloat16())


def test_a_bad_number_stays_one_in_the_step(device):
    weight = torch.ones(4, 64, dtype=torch.bfloat16, device=device)
    grad = torch.zeros_like(weight)
    grad[0, 3], grad[1, 3], grad[2, 3] = torch.nan, torch.inf, -torch.inf
    exp_avg, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
    adamw_prox_(weight, grad, exp_avg, exp_avg_sq, step=1, lr=0.1, reg_lambda=0.2, seed=9)
    assert exp_avg[:3, 3].tolist()[1:] == [torch.inf, -torch.inf]
    for tensor in (weight[:3, 3], exp_avg[:1, 3], exp_avg_sq[:1, 3]):
        assert tensor.isnan().all()


# ------------------------------------------------------------------------------------------ the mean


def test_the_mean_over_seeds_is_the_number(device):
    """2,000 roundings of each of 96 numbers: within 5 standard errors, where one of 100,000 tests may fail."""
    weight = bfloat16(3, 32).to(device)
    zero, one = torch.zeros_like(weight), torch.ones(3, 32, device=device)
    exact = weight.double() * (1 - 2.0**-10)
    total = torch.zeros_like(exact)
    for seed in range(2000):
        moved = weight.clone()
        adamw_prox_(moved, zero, one * 0, one, seed=seed, **EXACT)
        total += moved.double()
    unit = 2.0 ** (weight.double().abs().log2().floor() - 8)  # half a unit in the last place: at most its deviation
    error = (total / 2000 - exact).abs() / (2 * unit) / 2000**-0.5
    assert error.max() < 2.5


def test_the_mean_over_positions_is_the_number(device):
    count = 1 << 16
    weight = torch.full((count,), 1.5, dtype=torch.bfloat16, device=device)
    zero, one = torch.zeros_like(weight), torch.ones(count, device=device)
    adamw_prox_(weight, zero, one * 0, one, seed=77, **EXACT)
    exact, step = 1.5 * (1 - 2.0**-10), 2.0**-7
    assert weight.unique().tolist() == [1.5 - step, 1.5]
    assert abs(weight.double().mean().item() - exact) < 4 * 0.5 * step / count**0.5


def test_the_three_streams_of_bits_are_uniform_and_independent():
    count, seed, other = 1 << 16, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    streams = [bits.double() / 2**16 - 0.5 for bits in reference.random_bits(torch.empty(count), seed)]
    streams += [reference.random_bits(torch.empty(count), other)[0].double() / 2**16 - 0.5]
    streams += [streams[0].roll(1), streams[0].roll(4)]
    for stream in streams:
        assert abs(stream.mean()) < 4 * 12**-0.5 / count**0.5
        assert stream.square().mean().item() == pytest.approx(1 / 12, rel=0.02)
    correlation = torch.corrcoef(torch.stack(streams)).fill_diagonal_(0).abs().max()
    assert correlation < 5 / count**0.5
