"""EnumALM, EnumPGD and EnumIPM: right where the paper says so, and wrong where we say so."""

import itertools
import math

import pytest
import solver_quality
import torch
from ops.blocks import random_blocks
from reference import ground_truth

from proxsparse.reference import elementary_symmetric, prox_nm
from proxsparse.reference.paper_solvers import alm, enum_alm, enum_ipm, enum_pgd, enum_solve, ipm, pgd

# solver, tolerance, most iterations
SOLVERS = {"alm": (alm, 1e-12, 20_000), "pgd": (pgd, 1e-10, 100_000), "ipm": (ipm, 1e-13, 1000)}
each_solver = pytest.mark.parametrize(("solver", "tolerance", "most"), SOLVERS.values(), ids=SOLVERS)


def signed_blocks(count: int) -> torch.Tensor:
    """Uniform in [-1, 1]: [count, 4]."""
    return 2 * torch.rand(count, 4, dtype=torch.float64) - 1


def sorted_blocks(count: int) -> torch.Tensor:
    """Uniform in [0, 1], descending: [count, 4]."""
    return signed_blocks(count).abs().sort(dim=-1, descending=True).values


def hessian(w: torch.Tensor, reg_lambda: float) -> torch.Tensor:
    """Of g at w, by autograd: [problems, S] -> [problems, S, S]."""

    def g(w):
        return 0.5 * w.square().sum() + reg_lambda * elementary_symmetric(w, 3)

    return torch.stack([torch.autograd.functional.hessian(g, block) for block in w])


# ------------------------------------------------------------------------------------------ the three alike


@each_solver
@pytest.mark.parametrize("reg_lambda", [0.05, 0.3])
def test_easy_blocks_are_solved_by_all(solver, tolerance, most, reg_lambda):
    """EnumALM is only known to miss from lambda * z_1 = 0.31 on."""
    weight = signed_blocks(300)
    found, best = enum_solve(solver, weight, reg_lambda, tolerance, most).w, ground_truth.exact(weight, reg_lambda)
    gap = ground_truth.objective(found, weight, reg_lambda) - ground_truth.objective(best, weight, reg_lambda)
    assert gap.max() <= 1e-13
    torch.testing.assert_close(found, best, rtol=0, atol=1e-6)  # where w_4 just vanishes the barrier keeps sqrt(1e-13)


@each_solver
def test_answers_keep_signs_never_grow_and_follow_the_order_of_a_block(solver, tolerance, most):
    weight = random_blocks(300, 1.0, seed=21)
    found = enum_solve(solver, weight, 1.0, tolerance, min(most, 2000)).w
    assert (found * weight >= 0).all()
    assert (found.abs() <= weight.abs() + 1e-6).all()
    assert not (found.signbit() & (found == 0)).any()  # zeros are +0.0
    weight, order = signed_blocks(50), torch.tensor([2, 0, 3, 1])
    straight = enum_solve(solver, weight, 0.7, tolerance, most)
    turned = enum_solve(solver, -weight[:, order], 0.7, tolerance, most)
    assert torch.equal(-straight.w[:, order] + 0.0, turned.w)
    assert torch.equal(straight.iterations, turned.iterations)


@each_solver
def test_every_block_may_have_its_own_lambda(solver, tolerance, most):
    weight, lambdas = signed_blocks(4).view(2, 8), torch.tensor([[0.1, 2.0], [0.5, 1.0]], dtype=torch.float64)
    together = enum_solve(solver, weight, lambdas, tolerance, most)
    assert together.w.shape == weight.shape
    assert together.iterations.shape == lambdas.shape
    for block, lam, w in zip(weight.view(4, 4), lambdas.flatten().tolist(), together.w.view(4, 4), strict=True):
        torch.testing.assert_close(w, enum_solve(solver, block, lam, tolerance, most).w, rtol=1e-12, atol=1e-12)


@each_solver
def test_it_gives_up_after_the_most_iterations_and_an_empty_weight_needs_none(solver, tolerance, most):
    stopped = enum_solve(solver, signed_blocks(5), 0.8, tolerance, max_iterations=2)
    assert stopped.iterations.tolist() == [[4]] * 5  # two for each subproblem
    solution = enum_solve(solver, torch.empty(0, 8, dtype=torch.float64), 1.0, tolerance, most)
    assert (solution.w.shape, solution.iterations.shape) == ((0, 8), (0, 2))


def test_a_block_of_zeros_stays():
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    assert torch.equal(enum_pgd(zeros, 1.0), zeros)
    assert enum_ipm(zeros, 1.0).max() <= 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(2, 4)}, r"dtype torch.float32: .* pass weight.double\(\)"),
        ({"weight": torch.zeros(2, 6, dtype=torch.float64)}, r"\[2, 6\].* multiple of 4"),
        ({"reg_lambda": 0.0}, r"reg_lambda=0.0 must be finite and > 0; at 0 the prox is the identity"),
        ({"reg_lambda": math.nan}, "reg_lambda=nan"),
        ({"reg_lambda": torch.tensor([1.0, -1.0])}, "must be finite and > 0"),
        ({"tolerance": 0.0}, "tolerance=0.0 must be a finite number > 0"),
        ({"tolerance": math.inf}, "tolerance=inf"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"weight": torch.zeros(2, 4, dtype=torch.float64), "reg_lambda": 1.0, "tolerance": 1e-8} | change
    with pytest.raises(ValueError, match=message):
        enum_solve(pgd, **arguments, max_iterations=10)
    if "weight" not in change and "tolerance" not in change:
        with pytest.raises(ValueError, match=message):
            enum_alm(torch.ones(2, 4), **change)


# ------------------------------------------------------------------------------------------ each by itself


def test_enum_alm_misses_what_the_others_find():
    """z = (1.05, 1.05, 1.05, 0), lambda = 1: three weights with w + w^2 = 1.05 have objective 0.51429."""
    block = torch.tensor([1.05, 1.05, 1.05, 0.0], dtype=torch.float64)
    root = (math.sqrt(1 + 4 * 1.05) - 1) / 2
    paper = enum_solve(alm, block, 1.0, 1e-12, 1000).w
    assert sorted(paper.tolist()) == pytest.approx([0, 0, 1.05, 1.05], abs=1e-9)
    assert ground_truth.objective(paper, block, 1.0).item() == pytest.approx(0.55125, abs=1e-12)
    for found in (enum_pgd(block, 1.0), enum_ipm(block, 1.0)):
        assert found.tolist() == pytest.approx([root, root, root, 0], abs=1e-6)
        assert ground_truth.objective(found, block, 1.0).item() == pytest.approx(0.51429, abs=5e-6)


@pytest.mark.parametrize("tolerance", [0.3, 0.03, 1e-3])
@pytest.mark.parametrize("support", [3, 4])
def test_alm_halts_within_the_papers_bound(tolerance, support):
    """Proposition 6: no more than 3 lambda |z|^3 / eps^2 sweeps; it still makes the one that finds it has arrived."""
    z, lam = 2 * sorted_blocks(500), torch.linspace(0.05, 2, 500, dtype=torch.float64)
    solution = alm(z, lam, support, tolerance, max_iterations=100_000)
    bound = 3 * lam * z.norm(dim=-1) ** 3 / tolerance**2
    assert (solution.iterations <= bound.clamp_min(1)).all()
    again = alm(z, lam, support, tolerance, max_iterations=int(solution.iterations.max()) - 1)
    assert (again.iterations < solution.iterations).any()  # the count is of sweeps made, not of sweeps allowed


@pytest.mark.parametrize("support", [3, 4])
def test_vectorised_alm_is_the_algorithm_of_the_paper_block_by_block(support):
    z, lam = sorted_blocks(100), torch.linspace(0.1, 2, 100, dtype=torch.float64)
    together = alm(z, lam, support, 1e-6, 1000)
    one_by_one = [
        solver_quality.descend(block, strength, support, 1e-6, 1000)
        for block, strength in zip(z.tolist(), lam.tolist(), strict=True)
    ]
    torch.testing.assert_close(together.w, torch.tensor([w for w, _ in one_by_one], dtype=torch.float64))
    assert together.iterations.tolist() == [sweeps for _, sweeps in one_by_one]


def test_enum_alm_of_a_whole_weight_keeps_its_dtype_and_its_one_stop_test():
    weight = signed_blocks(64).view(8, 32)
    assert enum_alm(weight.bfloat16(), 0.3).dtype == torch.bfloat16
    torch.testing.assert_close(enum_alm(weight, 0.3), prox_nm(weight, 0.3), rtol=0, atol=1e-7)
    for sweeps in (1, 3):
        by_block = enum_solve(alm, weight, 0.3, tolerance=1e-300, max_iterations=sweeps).w
        assert torch.equal(enum_alm(weight, 0.3, max_sweeps=sweeps), by_block)
    assert torch.equal(enum_alm(weight, 0.3, tolerance=1e9), enum_alm(weight, 0.3, max_sweeps=1))


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, 1e-13])
def test_ipm_ends_within_its_tolerance_on_hard_blocks(tolerance):
    weight = random_blocks(1000, 1.0, seed=22)
    weight = weight[weight.abs().amax(-1) <= 1.5]  # beyond, [z_1, z_2, 0, 0] wins anyway
    found, best = enum_ipm(weight, 1.0, tolerance), ground_truth.exact(weight, 1.0)
    gap = ground_truth.objective(found, weight, 1.0) - ground_truth.objective(best, weight, 1.0)
    assert gap.max() <= tolerance + 1e-15
    assert tolerance == 1e-13 or gap.max() >= tolerance / 100  # it is a tolerance, not luck


@pytest.mark.parametrize("support", [3, 4])
def test_ipm_stays_inside_its_constraints(support):
    """lambda * z_1 up to 3: the semidefinite constraint binds in most of these."""
    z = 3 * sorted_blocks(60)
    w = ipm(z, torch.ones(60, dtype=torch.float64), support, 1e-13, 1000).w[:, :support]
    lowest = torch.linalg.eigvalsh(hessian(w, 1.0))[:, 0]
    assert (w > 0).all()
    assert lowest.min() >= -1e-12
    assert (lowest < 1e-6).sum() >= 20  # it does bind


def test_pgd_only_ever_descends_and_ends_at_a_critical_point():
    """One more step moves nothing; from the same start fewer steps leave a higher objective."""
    z, lam = 2 * sorted_blocks(200), torch.ones(200, dtype=torch.float64)
    heights = [
        ground_truth.objective(pgd(z, lam, 4, 1e-12, most).w, z, 1.0) for most in (1, 2, 5, 20, 100, 1000, 100_000)
    ]
    for before, after in itertools.pairwise(heights):
        assert (after <= before + 1e-15).all()
    w = pgd(z, lam, 4, 1e-12, 100_000).w
    others = torch.stack([elementary_symmetric(w[:, [j for j in range(4) if j != i]], 2) for i in range(4)], dim=-1)
    gradient = w - z + others
    torch.testing.assert_close(w, (w - gradient).clamp_min(0), rtol=0, atol=1e-10)


# ------------------------------------------------------------------------------------------ the benchmark of them


def test_table_1_in_small(monkeypatch):
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
    assert all(len(solver_quality.cells(row)) == len(solver_quality.HEADER) for row in easy + hard)


def test_thresholds_of_the_papers_path():
    """By hand: lambda * 1.4 * 1.1 >= 1.0; the other two are where the exact prox loses a weight."""
    y = torch.tensor(solver_quality.PATH_Y, dtype=torch.float64)
    three, two, jump = solver_quality.thresholds(y).values()
    assert two == pytest.approx(1 / 1.54, abs=1e-5)  # the step of the grid
    for where, before, after in ((three, 4, 3), (jump, 3, 2)):
        assert ((prox_nm(y, where - 1.1e-5) > 0).sum(), (prox_nm(y, where + 1e-9) > 0).sum()) == (before, after)


def test_the_path_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    solver_quality.path_figure().savefig(tmp_path / "new.png")
    assert (tmp_path / "new.png").read_bytes().startswith(b"\x89PNG")
