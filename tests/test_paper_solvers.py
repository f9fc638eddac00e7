"""EnumALM, EnumPGD and EnumIPM: exact where the paper says so, and EnumALM wrong where we say so."""

import math

import pytest
import solver_quality
import torch
from lib.paper_solvers import alm, enum_alm, enum_ipm, enum_pgd, enum_solve, ipm, pgd
from ops.blocks import random_blocks
from reference import ground_truth

from proxsparse.reference import elementary_symmetric, prox_nm

# solver, tolerance, limit of iterations
SOLVERS = {"alm": (alm, 1e-12, 20_000), "pgd": (pgd, 1e-10, 100_000), "ipm": (ipm, 1e-13, 1000)}
each_solver = pytest.mark.parametrize(("solver", "tolerance", "limit"), SOLVERS.values(), ids=SOLVERS)


def signed_blocks(count: int) -> torch.Tensor:
    """Uniform in [-1, 1]: [count, 4]."""
    return 2 * torch.rand(count, 4, dtype=torch.float64) - 1


def sorted_blocks(count: int) -> torch.Tensor:
    """Uniform in [0, 1], descending: [count, 4]."""
    return signed_blocks(count).abs().sort(dim=-1, descending=True).values


def gap(w: torch.Tensor, weight: torch.Tensor, reg_lambda: float) -> torch.Tensor:
    """objective(w) - objective(optimum) of every block."""
    best = ground_truth.exact(weight, reg_lambda)
    return ground_truth.objective(w, weight, reg_lambda) - ground_truth.objective(best, weight, reg_lambda)


@each_solver
@pytest.mark.parametrize("reg_lambda", [0.05, 0.3])
def test_all_solve_easy_blocks(solver, tolerance, limit, reg_lambda):
    """EnumALM is only known to miss from lambda * z_1 = 0.31 on."""
    weight = signed_blocks(300)
    w = enum_solve(solver, weight, reg_lambda, tolerance, limit).w
    assert gap(w, weight, reg_lambda).max() <= 1e-13
    # where w_4 just vanishes the barrier keeps sqrt(1e-13)
    torch.testing.assert_close(w, ground_truth.exact(weight, reg_lambda), rtol=0, atol=1e-6)


@each_solver
def test_signs_and_order_of_a_block_are_kept(solver, tolerance, limit):
    weight, order = signed_blocks(50), torch.tensor([2, 0, 3, 1])
    straight = enum_solve(solver, weight, 0.7, tolerance, limit)
    turned = enum_solve(solver, -weight[:, order], 0.7, tolerance, limit)
    assert (straight.w * weight >= 0).all()
    assert not (turned.w.signbit() & (turned.w == 0)).any()  # zeros are +0.0
    assert torch.equal(-straight.w[:, order] + 0.0, turned.w)
    assert torch.equal(straight.iterations, turned.iterations)


@each_solver
def test_one_lambda_for_each_block_and_the_limit_of_iterations(solver, tolerance, limit):
    weight, lambdas = signed_blocks(4).view(2, 8), torch.tensor([[0.1, 2.0], [0.5, 1.0]], dtype=torch.float64)
    together = enum_solve(solver, weight, lambdas, tolerance, limit)
    assert together.iterations.shape == lambdas.shape
    for block, lam, w in zip(weight.view(4, 4), lambdas.flatten().tolist(), together.w.view(4, 4), strict=True):
        torch.testing.assert_close(w, enum_solve(solver, block, lam, tolerance, limit).w, rtol=1e-12, atol=1e-12)
    stopped = enum_solve(solver, weight, 0.8, tolerance, max_iterations=2)
    assert stopped.iterations.tolist() == [[4, 4]] * 2  # two for each subproblem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(2, 4)}, r"dtype torch.float32: .* pass weight.double\(\)"),
        ({"weight": torch.zeros(2, 6, dtype=torch.float64)}, r"\[2, 6\].* multiple of 4"),
        ({"reg_lambda": 0.0}, r"reg_lambda=0.0 must be finite and > 0; at 0 the prox is the identity"),
        ({"reg_lambda": torch.tensor([1.0, -1.0])}, "must be finite and > 0"),
        ({"tolerance": math.inf}, "tolerance=inf must be a finite number > 0"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = {"weight": torch.zeros(2, 4, dtype=torch.float64), "reg_lambda": 1.0, "tolerance": 1e-8} | change
    with pytest.raises(ValueError, match=message):
        enum_solve(pgd, **arguments, max_iterations=10)


def test_enum_alm_misses_what_the_others_find():
    """z = (1.05, 1.05, 1.05, 0), lambda = 1: three weights with w + w^2 = 1.05 have objective 0.51429."""
    block = torch.tensor([1.05, 1.05, 1.05, 0.0], dtype=torch.float64)
    root = (math.sqrt(1 + 4 * 1.05) - 1) / 2
    paper = enum_solve(alm, block, 1.0, 1e-12, 1000).w
    assert sorted(paper.tolist()) == pytest.approx([0, 0, 1.05, 1.05], abs=1e-9)
    assert ground_truth.objective(paper, block, 1.0).item() == pytest.approx(0.55125, abs=1e-12)
    for w in (enum_pgd(block, 1.0), enum_ipm(block, 1.0)):
        assert w.tolist() == pytest.approx([root, root, root, 0], abs=1e-6)
        assert ground_truth.objective(w, block, 1.0).item() == pytest.approx(0.51429, abs=5e-6)


@pytest.mark.parametrize("support", [3, 4])
def test_alm_is_the_algorithm_of_the_paper_and_stops_within_its_bound(support):
    """Proposition 6: at most 3 lambda |z|^3 / tolerance^2 sweeps."""
    z, lam, tolerance = sorted_blocks(100), torch.linspace(0.1, 2, 100, dtype=torch.float64), 1e-3
    together = alm(z, lam, support, tolerance, 1000)
    one_by_one = [
        solver_quality.descend(block, strength, support, tolerance, 1000)
        for block, strength in zip(z.tolist(), lam.tolist(), strict=True)
    ]
    torch.testing.assert_close(together.w, torch.tensor([w for w, _ in one_by_one], dtype=torch.float64))
    assert together.iterations.tolist() == [sweeps for _, sweeps in one_by_one]
    assert (together.iterations <= 3 * lam * z.norm(dim=-1) ** 3 / tolerance**2).all()


def test_enum_alm_of_a_whole_weight_keeps_its_dtype_and_has_one_stop_test():
    weight = signed_blocks(64).view(8, 32)
    assert enum_alm(weight.bfloat16(), 0.3).dtype == torch.bfloat16
    torch.testing.assert_close(enum_alm(weight, 0.3), prox_nm(weight, 0.3), rtol=0, atol=1e-7)
    by_block = enum_solve(alm, weight, 0.3, tolerance=1e-300, max_iterations=3).w
    assert torch.equal(enum_alm(weight, 0.3, max_sweeps=3), by_block)
    assert torch.equal(enum_alm(weight, 0.3, tolerance=1e9), enum_alm(weight, 0.3, max_sweeps=1))


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, 1e-13])
def test_ipm_ends_within_its_tolerance_on_hard_blocks(tolerance):
    weight = random_blocks(1000, 1.0, seed=22)
    weight = weight[weight.abs().amax(-1) <= 1.5]  # beyond, [z_1, z_2, 0, 0] is the best anyway
    worst = gap(enum_ipm(weight, 1.0, tolerance), weight, 1.0).max()
    assert worst <= tolerance + 1e-15
    assert tolerance == 1e-13 or worst >= tolerance / 100  # the tolerance decides, not luck


@pytest.mark.parametrize("support", [3, 4])
def test_ipm_stays_inside_its_constraints(support):
    """lambda * z_1 up to 3: the semidefinite constraint is active in most of these."""
    w = ipm(3 * sorted_blocks(60), torch.ones(60, dtype=torch.float64), support, 1e-13, 1000).w[:, :support]
    assert (w > 0).all()

    def g(w):
        return 0.5 * w.square().sum() + elementary_symmetric(w, 3)

    hessians = torch.stack([torch.autograd.functional.hessian(g, block) for block in w])
    lowest = torch.linalg.eigvalsh(hessians)[:, 0]
    assert lowest.min() >= -1e-12
    assert (lowest < 1e-6).sum() >= 20  # it is active


def test_pgd_ends_at_a_critical_point():
    z, lam = 2 * sorted_blocks(200), torch.ones(200, dtype=torch.float64)
    w = pgd(z, lam, 4, 1e-12, 100_000).w
    others = torch.stack([elementary_symmetric(w[:, [j for j in range(4) if j != i]], 2) for i in range(4)], dim=-1)
    torch.testing.assert_close(w, (w - (w - z + others)).clamp_min(0), rtol=0, atol=1e-10)


def test_table_1_on_a_few_blocks(monkeypatch):
    """Nothing misses on the blocks of Table 1; on the hard blocks EnumALM does, and only EnumALM."""

    def run_once(run, *_arguments, **_settings):
        run()
        return {"p50_ms": 1.0}

    monkeypatch.setattr(solver_quality, "repeated", run_once)
    generator = torch.Generator().manual_seed(0)
    easy = solver_quality.compare(solver_quality.table_1(20, 10, generator), generator)
    hard = solver_quality.compare(solver_quality.hard_problems(20, 10, generator), generator)
    assert len(easy) == len(hard) == 6
    assert max(row["max_suboptimality"] for row in easy) <= 1e-12
    for row in hard:
        misses = row["solver"].startswith("EnumALM")
        assert (row["misses"] > 0) == misses
        assert (row["max_suboptimality"] > 1e-3) == misses
