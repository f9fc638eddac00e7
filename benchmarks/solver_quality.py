"""The paper's Table 1 with EnumALM and our solvers: their time, and the distance of their results from the optimum.

    python benchmarks/solver_quality.py                  # Table 1 and both pictures: about a minute
    python benchmarks/solver_quality.py --hard           # also blocks on and near ties, some of which EnumALM misses

Table 1 of the paper solves 100 random blocks for 200 lambdas each, without saying which. Here the blocks are standard
normal and the lambdas evenly spaced in [0.01, 3], in float64 on the CPU. Vectorized code solves all 20,000 problems
together; `prox_nm_` is called once for each lambda. `suboptimality` is the largest objective(w) - best, and `misses`
counts those above 1e-9. `best` is the least objective found by any of these solvers or by coordinate descent from a
dozen random starts, up to about 1e-16.

Rows are appended to results/solver_quality.jsonl. Pictures: regularisation_path.png, the weights of one block over
lambda; enum_alm_misses.png, which blocks EnumALM misses, and by how much.
"""

import argparse
import math
import statistics
import sys
from functools import partial

import torch
from lib import paper_solvers, plots
from lib.common import Results, new_parser
from lib.measure import elapsed_ms
from torch import Tensor

from proxsparse import reference
from proxsparse.errors import run_command
from proxsparse.ops import prox_nm_
from proxsparse.ops.registry import select

COLUMNS = {
    "problems": "{problems}",
    "solver": "{solver}",
    "seconds": "{seconds:.4f}",
    "suboptimality": "{max_suboptimality:.1e}",
    "misses": "{misses}",
    "iterations": "{mean_iterations:.0f}",
    "most": "{max_iterations:.0f}",
}
CPU = torch.device("cpu")
MISS = 1e-9


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    generator = torch.Generator().manual_seed(args.seed)
    results = Results("solver_quality", CPU, not args.no_save, arguments)
    for problems in (table_1, hard_problems) if args.hard else (table_1,):
        y, lambdas = problems(args.instances, args.lambdas, generator)
        rows = compare(y.repeat(len(lambdas), 1), lambdas.repeat_interleave(len(y)), generator)
        results.add([{"problems": NAMES[problems], "count": len(y) * len(lambdas)} | row for row in rows])
    results.show(COLUMNS, f"misses: objectives more than {MISS:g} above the best")
    if results.save:
        plots.draw(results.file.with_name("regularisation_path.png"), path_figure)
        plots.draw(results.file.with_name("enum_alm_misses.png"), misses_figure)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--instances", type=int, default=100, help="number of random blocks")
    parser.add_argument("--lambdas", type=int, default=200, help="number of lambdas for each block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hard", action="store_true", help="also blocks on and near ties, lambda * z_1 in [0.3, 1.21]")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args(arguments)


def table_1(instances: int, lambdas: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Standard normal blocks [instances, 4], and lambda evenly spaced in [0.01, 3]: each with each."""
    y = torch.randn(instances, 4, generator=generator, dtype=torch.float64)
    return y, torch.linspace(0.01, 3, lambdas, dtype=torch.float64)


def hard_problems(instances: int, lambdas: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Half the blocks have only two different magnitudes, half have four within a few percent; z_1 = 1."""
    half = instances // 2
    levels = torch.rand(half, 2, generator=generator, dtype=torch.float64)
    tied = levels.gather(1, torch.randint(2, (half, 4), generator=generator))
    near = 1 + 0.02 * torch.randn(instances - half, 4, generator=generator, dtype=torch.float64)
    y = torch.cat([tied, near])
    return y / y.amax(1, keepdim=True), torch.linspace(0.3, 1.21, lambdas, dtype=torch.float64)


NAMES = {table_1: "Table 1", hard_problems: "hard"}


def compare(y: Tensor, lam: Tensor, generator: torch.Generator) -> list[dict[str, object]]:
    """A row for each solver, with its suboptimality on the blocks y [problems, 4] with lam [problems], ascending."""
    backend = select("prox_nm_", torch.zeros(1, 4, dtype=torch.float64), 1.0, 2, 4).backend
    solvers = {"EnumALM": paper, "ours: reference": plain_torch, f"ours: {backend}": op}
    answers = {name: solve(y, lam) for name, solve in solvers.items()}
    objectives = {name: reference.objective(w.abs(), y.abs(), lam, 2) for name, (w, _) in answers.items()}
    best = torch.stack([*objectives.values(), least_objective(y.abs(), lam, generator)]).amin(0)
    rows = []
    for name, (_, sweeps) in answers.items():
        seconds = statistics.median(elapsed_ms(partial(solvers[name], y, lam), CPU) for _ in range(3)) / 1000
        above = objectives[name] - best
        row = {"solver": name, "seconds": seconds, "max_suboptimality": above.max().item()}
        row |= {"misses": (above > MISS).sum().item()}
        row |= {"mean_iterations": None if sweeps is None else sweeps.double().mean().item()}
        rows.append(row | {"max_iterations": None if sweeps is None else sweeps.max().item()})
    return rows


def paper(y: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """EnumALM: w and the sweeps of each problem."""
    return paper_solvers.enum_alm_by_block(y, lam[:, None], tolerance=1e-10, max_sweeps=100_000)


def plain_torch(y: Tensor, lam: Tensor) -> tuple[Tensor, None]:
    """Our reference; lambda * y makes every lambda 1."""
    return reference.prox_nm(lam[:, None] * y, 1.0) / lam[:, None], None


def op(y: Tensor, lam: Tensor) -> tuple[Tensor, None]:
    """The op on the fastest backend, once for each lambda."""
    w, (lambdas, counts) = y.clone(), lam.unique_consecutive(return_counts=True)
    for blocks, reg_lambda in zip(w.split(counts.tolist()), lambdas.tolist(), strict=True):
        prox_nm_(blocks, reg_lambda)
    return w, None


def least_objective(z: Tensor, lam: Tensor, generator: torch.Generator, starts: int = 12) -> Tensor:
    """The least objective that coordinate descent reaches from random points of the box [0, z]; [problems]."""
    z, lam = z.repeat(starts, 1), lam.repeat(starts)
    start = z * torch.rand(z.shape, generator=generator, dtype=torch.float64)
    w = paper_solvers.descend(start, z, lam, tolerance=1e-9, max_sweeps=300).w
    return reference.objective(w, z, lam, 2).view(starts, -1).amin(0)


PATH_Y = (1.4, 1.1, 1.0, 0.7)  # the example of the paper's appendix C
COUNTEREXAMPLE = (1.05, 1.05, 1.05, 0)  # lambda = 1


def path_figure():
    """The optimum for PATH_Y over lambda."""
    y = torch.tensor(PATH_Y, dtype=torch.float64)
    lambdas = torch.linspace(0.001, 0.8, 1600, dtype=torch.float64)
    exact = reference.prox_nm(lambdas[:, None] * y, 1.0) / lambdas[:, None]
    leap = exact.diff(dim=0).abs().amax(-1) > 0.05  # the optimum jumps there: the line is broken
    exact[1:][leap] = math.nan
    series = {}
    for value, weight in zip(PATH_Y, exact.T.tolist(), strict=True):
        series[f"y = {value}"] = [(lam, w, "") for lam, w in zip(lambdas.tolist(), weight, strict=True)]
    return plots.chart("Regularization path", [("", "λ   [1 / unit of y]", series)], "weight", (7, 4))


def misses_figure():
    """The objective of EnumALM above the optimum in percent: blocks with a tie, maximum over the free weight."""
    from matplotlib.colors import LogNorm

    strength, tie = torch.linspace(0.5, 1.25, 101).double(), torch.linspace(0.3, 1, 85).double()
    u1, ratio = torch.meshgrid(strength, tie, indexing="xy")
    share = torch.linspace(0, 1, 161, dtype=torch.float64)  # of the range of the free weight
    top, tied = (grid[..., None].expand(-1, -1, len(share)) for grid in (u1, u1 * ratio))
    below, between = tied * share, tied + (top - tied) * share
    left, right = plots.panels(2, 5, 4.3, "Where EnumALM misses the optimum (white: it does not)")
    for axes, z, names, rest in (
        (left, (top, tied, tied, below), ("z_2", "z_3"), "z_4"),
        (right, (top, between, tied, tied), ("z_3", "z_4"), "z_2"),
    ):
        percent = 100 * relative_miss(torch.stack(z, dim=-1)).amax(-1)
        hit = percent.where(percent > 1e-3, math.nan)
        mesh = axes.pcolormesh(strength, tie, hit, cmap="YlOrRd", norm=LogNorm(1e-3, 10), rasterized=True)
        axes.set(xlabel=r"strength $\lambda z_1$", ylabel=f"tie ${names[0]} / z_1 = {names[1]} / z_1$")
        axes.set_title(f"${names[0]} = {names[1]}$, maximum over ${rest}$", size=10)
    left.figure.colorbar(mesh, ax=[left, right], label="objective above the optimum   [%]", shrink=0.9)
    z1, z2, *_ = COUNTEREXAMPLE
    left.plot(z1, z2 / z1, "*", ms=14, mfc="white", mec="black", clip_on=False, zorder=3)
    text, where = rf"$z = {COUNTEREXAMPLE}$, $\lambda = 1$", {"textcoords": "offset points", "ha": "center"}
    left.annotate(text, (z1, z2 / z1), (0, -62), arrowprops={"arrowstyle": "-"}, **where)
    return left.figure


def relative_miss(z: Tensor) -> Tensor:
    """objective(EnumALM) / objective(optimum) - 1 at lambda = 1; [..., 4] -> [...]."""

    def of_chunk(z: Tensor) -> Tensor:
        found = paper_solvers.enum_alm_by_block(z, 1.0, tolerance=1e-6, max_sweeps=1000).w
        optimum = reference.prox_nm(z, 1.0)
        return reference.objective(found, z, 1.0, 2) / reference.objective(optimum, z, 1.0, 2) - 1

    chunks = z.reshape(-1, 4).split(1 << 16)  # a chunk fits into the cache
    return torch.cat([of_chunk(chunk) for chunk in chunks]).view(z.shape[:-1])


if __name__ == "__main__":
    sys.exit(run_command(main))
