"""Every op on blocks, on every backend of this machine: equals the reference whatever the shape, dtype and strides."""

import re

import pytest
import torch
from ops.blocks import LAYOUTS
from ops.cases import (
    STEP,
    assert_matches,
    bits,
    copied,
    each_case,
    each_dtype,
    each_kernel,
    each_traced_case,
    feasible,
    hard,
    masked,
    ranked,
    step_,
    step_problem,
)
from ops.on_each_backend import backends_of

from proxsparse import nm_mask, prox_nm, prox_nm_, reference
from proxsparse.ops import adamw_prox_, masked_weight_, pack_nm, prox_nm_list_, unpack_nm, use_backend
from proxsparse.reference import pack

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")
SHAPES = [(1, 4), (4,), (3, 12), (7, 276), (5, 260), (2, 3, 8), (33, 36), (130, 64), (1, 4100), (3, 14), (1, 2050)]
EMPTY = [(0, 8), (3, 0), (0,), (2, 0, 4)]
SIZES = (*range(1, 42), 128, 255, 257, 1031)  # of blocks, or of numbers


def moved(tensors, device):
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


@each_dtype
@each_case
def test_matches_reference(case, place, dtype, serve):
    device = serve(case.op, place)
    for shape in SHAPES + EMPTY:
        if not case.accepts(shape):
            continue
        inputs = case.inputs(shape, dtype, seed=len(shape))
        given = moved(inputs, device)
        if (results := case.served(given)) is None:
            pytest.skip("the backend does not pack this dtype")
        assert_matches(case, results, inputs, dtype, shape)
        for name in given.keys() - results.keys():
            assert torch.equal(bits(given[name]), bits(inputs[name])), f"{name} changed"


@each_dtype
@each_kernel
def test_any_size_at_any_address_between_guards(case, place, dtype, serve):
    """Rows that no vector register divides; tensors begin at a multiple of 16 bytes or elsewhere, all or one alone."""
    device = serve(case.op, place)

    def among_nan(tensor, start):
        memory = torch.full((tensor.numel() + 64,), torch.nan, dtype=tensor.dtype, device=device)
        return memory, memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)

    names = list(case.inputs((case.block,), dtype, 0))
    alone = [(43, {name: 17}) for name in names]
    for count, starts in [*((n, dict.fromkeys(names, s)) for n in SIZES for s in (16, 19)), *alone]:
        inputs = case.inputs((1, count * case.block + case.remainder), dtype, seed=count)
        placed = {name: among_nan(tensor, starts.get(name, 16)) for name, tensor in inputs.items()}
        results = case.served({name: inside for name, (_, inside) in placed.items()})
        if results is not None:
            assert_matches(case, results, inputs, dtype, (count, starts))
        for name, (memory, inside) in placed.items():
            start = starts.get(name, 16)
            assert memory[:start].isnan().all(), (count, name)
            assert memory[start + inside.numel() :].isnan().all(), (count, name)


@each_dtype
@each_case
def test_any_strides(case, place, dtype, serve):
    """The bits of contiguous tensors, in this memory and nowhere else."""
    device = serve(case.op, place)
    for layout, view_of in LAYOUTS.items():
        shape = view_of(torch.zeros(24, 24)).shape
        if not case.accepts(shape):
            continue
        inputs = case.inputs(shape, dtype, seed=8)
        if (plain := case.served(moved(inputs, device))) is None:
            pytest.skip("the backend does not pack this dtype")
        assert_matches(case, plain, inputs, dtype, layout)
        bases, views = {}, {}
        for name, tensor in inputs.items():
            columns = name == "scale"
            size = (tensor.numel(), 2) if columns else (24, 24)
            bases[name] = torch.full(size, 7.0, dtype=tensor.dtype, device=device)
            views[name] = bases[name][:, 1] if columns else view_of(bases[name])
            views[name].copy_(tensor)
        before = copied(bases)
        results = case.served(views) or {}
        for name, result in results.items():
            assert torch.equal(bits(result), bits(plain[name])), (name, layout)
        for name, base in bases.items():
            if name in results:
                view_of(before[name]).copy_(plain[name])
            assert torch.equal(bits(base), bits(before[name])), (name, layout)


@pytest.mark.parametrize("place", backends_of("nm_mask"))
def test_a_score_that_repeats_in_memory(place, serve):
    score = hard((1, 8), torch.float32, 21).to(serve("nm_mask", place))
    assert torch.equal(nm_mask(score.expand(5, 8)), nm_mask(score).expand(5, 8))


# ------------------------------------------------------------------------------------------ torch around it


@each_traced_case
def test_versions_are_counted_and_leaves_stay_leaves(case, place, serve):
    given = moved(case.inputs((6, 12), torch.bfloat16, seed=1), serve(case.op, place))
    for tensor in given.values():
        tensor.requires_grad_()
    versions = {name: tensor._version for name, tensor in given.items()}
    results = case.call(given)
    for name, tensor in given.items():
        assert (tensor._version > versions[name]) == (name in results), name
        assert tensor.requires_grad
        assert tensor.grad_fn is None
    assert not any(result.requires_grad for name, result in results.items() if name not in given)


@each_traced_case
def test_opcheck(case, place, serve):
    device = serve(case.op, place)
    plain = moved(case.inputs((3, 12), torch.float32, seed=2), device)
    strided = {name: tensor if tensor.ndim == 1 else tensor.T.contiguous().T for name, tensor in plain.items()}
    for tensors in (plain, strided):
        torch.library.opcheck(getattr(torch.ops.proxsparse, case.op).default, case.arguments(copied(tensors)))
        if case.op == "pack_nm":
            torch.library.opcheck(torch.ops.proxsparse.unpack_nm.default, pack_nm(tensors["weight"]))


@each_traced_case
def test_compiles_without_a_graph_break(case, place, serve):
    """Also on a tensor that is made within the graph."""

    def twice(tensors):
        return case.call({name: tensor * 2 for name, tensor in tensors.items()}), case.call(tensors)

    inputs = moved(case.inputs((6, 12), torch.float32, seed=3), serve(case.op, place))
    plain, compiled = copied(inputs), copied(inputs)
    torch.compiler.reset()
    re.purge()  # as in a new process
    results = torch.compile(twice, fullgraph=True, backend="aot_eager")(compiled)
    for ours, theirs in zip((*results, compiled), (*twice(plain), plain), strict=True):
        assert all(torch.equal(bits(ours[name]), bits(theirs[name])) for name in theirs)


# ------------------------------------------------------------------------------------------ other patterns, refusals


@pytest.mark.parametrize("pattern", ["1:2", "2:6", "4:8", "3:5"])
def test_the_reference_serves_other_patterns(pattern):
    n, m = map(int, pattern.split(":"))
    weight, pretrained = (hard((40, 2 * m), torch.float32, seed) for seed in (1, 2))
    scale = torch.rand(2 * m)
    mask = nm_mask(weight, pattern)
    assert torch.equal(mask.view(-1, m), ranked(weight.view(-1, m), n))
    out = masked_weight_(torch.empty_like(weight), weight, pretrained, scale, pattern)
    assert torch.equal(bits(out), bits(masked(weight, pretrained, scale, pattern)))
    tensors = step_problem((2, 2 * m), torch.float32, parts=("scale",))
    plain, c = tensors["weight"].clone(), tensors["scale"]
    assert torch.equal(prox_nm(plain, 0.4, pattern), reference.prox_nm(plain, 0.4, pattern))
    listed = [plain.clone(), plain.clone()]
    prox_nm_list_(listed, [0.4, 0.0], pattern)
    assert torch.equal(listed[0], reference.prox_nm(plain, 0.4, pattern))
    assert torch.equal(listed[1], plain)
    with use_backend("reference"):
        adamw = step_(copied(tensors), reg_lambda=0.0)["weight"]
    result = step_(tensors, reg_lambda=0.4, pattern=pattern)["weight"]
    assert torch.equal(result, reference.prox_nm(adamw, 0.4, pattern, c))


W = torch.ones(2, 8)
HALF, WIDE, SHORT, INTEGERS = W.bfloat16(), W.double(), torch.ones(2, 4), W.long()
NO_BLOCKS, NUMBER = torch.ones(3, 131), torch.tensor(1.0)


def prox(weight=W, reg_lambda=0.7, pattern="2:4"):
    return lambda: (prox_nm(weight, reg_lambda, pattern), prox_nm_(weight, reg_lambda, pattern))


def proxes(*arguments):
    return lambda: prox_nm_list_(*arguments)


def adamw(*tensors, **options):
    return lambda: adamw_prox_(*tensors or (W,) * 4, **STEP | {"reg_lambda": 0.0} | options)


def under_mask(*tensors):
    return lambda: masked_weight_(*tensors)


def packed(weight, pattern="2:4"):
    return lambda: pack_nm(weight, pattern)


def unpacked(place=None, byte=None, **replaced):
    """unpack_nm of a good [2, 12] weight, with one byte or a whole tensor replaced."""
    values, indices = pack.pack_nm(feasible((2, 12), torch.float32, 3))
    tensors = {"values": values, "indices": indices} | replaced
    if place is not None:
        tensors["indices"][place] = byte
    return lambda: unpack_nm(**tensors)


REFUSED = [
    (prox(NO_BLOCKS, pattern="1:4"), r"\[3, 131\].*multiple of 4.*exclude"),
    (prox(NO_BLOCKS), r"\[3, 131\].*even number of at least 4.*exclude"),
    (prox(NUMBER), r"\[\].*even number of at least 4"),
    (prox(INTEGERS), "torch.int64.*convert"),
    (prox(W.to(torch.complex64)), "torch.complex64.*convert"),
    (prox(reg_lambda=-0.5), "reg_lambda=-0.5.*>= 0"),
    (prox(reg_lambda=float("nan")), "reg_lambda=nan.*finite"),
    (prox(reg_lambda=float("inf")), "reg_lambda=inf.*finite"),
    (prox(pattern="4:2"), "4:2.*n < m"),
    (prox(pattern="2/4"), "'2/4'.*N:M"),
    (proxes([W], [0.1, 0.2]), "1 weights and 2 lambdas"),
    (proxes([W, W], [0.1, 0.2]), "twice"),
    (proxes([W, NO_BLOCKS], [0.1, 0.2]), r"weights\[1\].*even number of at least 4"),
    (proxes([W, SHORT], [0.1, -0.2]), r"weights\[1\].*-0.2"),
    (proxes([W, INTEGERS], [0.1, 0.2]), r"weights\[1\].*int64"),
    (adamw(INTEGERS, W, W, W), "int64.*convert"),
    (adamw(W, SHORT, W, W), r"grad is torch.float32 \[2, 4\].*must be float32 or bfloat16 \[2, 8\]"),
    (adamw(W, WIDE, W, W), "grad is torch.float64.*must be float32 or bfloat16"),
    (adamw(HALF, W, W, W), "grad is torch.float32.*must be bfloat16"),
    (adamw(W, W, WIDE, WIDE), "exp_avg is torch.float64.*float32 or bfloat16"),
    (adamw(WIDE, WIDE, HALF, HALF), "exp_avg is torch.bfloat16.*must be float64.*; convert it, or create the"),
    (adamw(W, W, W, HALF), "exp_avg_sq is torch.bfloat16.*must be float32"),
    (adamw(W, W, W, W, W), "can have a master, not torch.float32"),
    (adamw(HALF, HALF, W, W, WIDE), "master is torch.float64.*must be float32"),
    (adamw(W, W, W, W, None, torch.ones(4)), r"scale is .*\[4\].*\[8\]"),
    (adamw(*[torch.ones(2, 7)] * 4, reg_lambda=0.1), r"\[2, 7\].*even number of at least 4.*exclude"),
    (adamw(reg_lambda=-0.1), "reg_lambda=-0.1"),
    (adamw(pattern="4:2"), "4:2"),
    (adamw(step=0), "step=0.*counted from 1"),
    (adamw(lr=float("nan")), "lr=nan must be"),
    (adamw(eps=-1.0), "eps=-1.0 must be"),
    (adamw(weight_decay=-1.0), "weight_decay=-1.0 must be"),
    (adamw(betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\)"),
    (lambda: nm_mask(NO_BLOCKS), r"score of shape \[3, 131\].*even number of at least 4.*exclude"),
    (lambda: nm_mask(INTEGERS), "torch.int64.*convert"),
    (lambda: nm_mask(W.bool()), "torch.bool.*convert"),
    (under_mask(*[NO_BLOCKS] * 3), r"weight of shape \[3, 131\].*even number of at least 4.*exclude"),
    (under_mask(*[INTEGERS] * 3), "torch.int64.*convert"),
    (under_mask(W, SHORT, SHORT), r"out is .*\[2, 8\].*must be float32 or bfloat16 \[2, 4\]"),
    (under_mask(W, W, torch.ones(8)), r"pretrained is .*\[8\].*must be .*\[2, 8\]"),
    (under_mask(W, W, W, torch.ones(4)), r"scale is .*\[4\].*must be .*\[8\]"),
    (under_mask(WIDE, W, W), "out is torch.float64.*must be float32 or bfloat16"),
    (under_mask(W, HALF, HALF), "out is torch.float32.*must be bfloat16"),
    (packed(NO_BLOCKS), r"shape \[3, 131\]"),
    (packed(INTEGERS), "torch.int64.*convert it first"),
    (packed(NUMBER), r"shape \[\]"),
    (packed(W, "1:4"), "pattern 1:4: packed layers are 2:4, 4:6, 6:8"),
    (unpacked((1, 0), 0x45), r"block 0 of row 1 has the places \[1, 1\]"),
    (unpacked((0, 0), 0x14), r"block 1 of row 0 has the places \[1, 0\]"),
    (unpacked((1, 1), 0x14), "bits after the last place"),
    (unpacked(values=torch.zeros(2, 7)), r"values of shape \[2, 7\]: the last dimension must be a multiple of 2"),
    (unpacked(values=torch.zeros(2, 8)), r"need torch.uint8 \[2, 2\]|out of order|after"),
    (unpacked(values=torch.zeros(3, 6)), r"need torch.uint8 \[3, 2\]"),
    (unpacked(values=NUMBER), r"values of shape \[\]"),
    (unpacked(values=torch.zeros(2, 6).int()), "values has dtype torch.int32"),
    (unpacked(indices=torch.zeros(2, 3).byte()), r"indices are torch.uint8 \[2, 3\]"),
    (unpacked(indices=torch.zeros(2, 2).char()), "indices are torch.int8"),
    (unpacked(indices=torch.zeros(2, 2, dtype=torch.uint8, device="meta")), "on meta"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_bad_input_is_refused_with_the_value_and_the_remedy_before_anything_changes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert all((tensor == 1).all() for tensor in (W, HALF, WIDE, SHORT, INTEGERS, NO_BLOCKS))


def test_an_empty_list_is_accepted():
    assert prox_nm_list_([], []) is None
