"""Checks of prox_nm_, prox_nm_list_ and nm_mask on one backend, against float64 and between guards."""

import torch
from checking import (
    TIES,
    Place,
    Skipped,
    check,
    guarded,
    hard_weights,
    judge_prox,
    needs,
    needs_memory,
    same_bits,
)
from torch import Tensor

from proxsparse import reference
from proxsparse.ops import nm_mask, prox_nm, prox_nm_, prox_nm_list_, use_backend

LAMBDAS = {2: (0.05, 0.7, 25.0), 1: (0.3, 0.999, 2.0)}  # n -> lambda; float16 has no room for more than that


def each_prox(place: Place):
    """(n, dtype, lambda) for all that this backend serves; Skipped if that is nothing."""
    for n, lambdas in LAMBDAS.items():
        for dtype in place.dtypes:
            weight = torch.zeros(1, 4, dtype=dtype, device=place.device)
            try:
                needs(place, "prox_nm_", weight, 1.0, n, 4, None)
            except Skipped:
                if (n, dtype) == (2, torch.float32):
                    raise
                continue
            yield from ((n, dtype, reg_lambda) for reg_lambda in lambdas)


@check("prox_nm_")
def exact(place: Place) -> str:
    """Every dtype, 2:4 and 1:4, odd shapes, with and without a metric, aligned or not, between guards."""
    for n, dtype, reg_lambda in each_prox(place):
        for shape in place.shapes:
            for offset, with_scale in ((0, False), (0, True), (3, False), (4, True)):
                if dtype == torch.float16 and with_scale:
                    continue  # its range ends where hard_weights needs it
                what = f"{n}:4 {dtype} {list(shape)} lambda={reg_lambda} offset={offset} scale={with_scale}"
                scale = 0.1 + 4 * torch.rand(shape[-1], device=place.device) if with_scale else None
                values = hard_weights(shape, reg_lambda, torch.float64, place.device)
                values = (values if scale is None else values / scale.double()).to(dtype)
                weight = guarded(values, offset)
                with use_backend(place.backend):
                    prox_nm_(weight.tensor, reg_lambda, f"{n}:4", scale)
                weight.assert_intact(what)
                if place.judge:
                    judge_prox(weight.tensor, values, reg_lambda, n, scale, what)
    return f"{len({kind[:2] for kind in each_prox(place)})} of {len(LAMBDAS) * len(place.dtypes)} patterns and dtypes"


@check("prox_nm_")
def layouts(place: Place) -> None:
    """Strided and transposed weights give the bits of contiguous ones, and nothing beside them is written."""
    views = {
        "every third row": lambda base: base[::3],
        "columns": lambda base: base[:, 4:-4],
        "every second column": lambda base: base[:, ::2],
        "transposed": lambda base: base.T,
        "one row": lambda base: base[5:6],
    }
    for n, dtype, reg_lambda in each_prox(place):
        base = hard_weights((48, 64), reg_lambda, dtype, place.device)
        for name, view in views.items():
            memory = guarded(base)
            inside = torch.zeros(base.shape, dtype=torch.bool, device=place.device)
            view(inside).fill_(True)
            with use_backend(place.backend):
                expected = prox_nm(view(base).contiguous(), reg_lambda, f"{n}:4")
                prox_nm_(view(memory.tensor), reg_lambda, f"{n}:4")
            what = f"{n}:4 {dtype} {name}"
            assert same_bits(view(memory.tensor), expected), f"{what}: other values than the contiguous weight's"
            assert same_bits(memory.tensor[~inside], base[~inside]), f"{what}: wrote beside the view"
            memory.assert_intact(what)


@check("prox_nm_")
def not_finite(place: Place) -> None:
    """A block with a NaN or an infinity stays as it is, and its neighbours are solved as without it."""
    for n, dtype, reg_lambda in each_prox(place):
        values = hard_weights((64, 64), reg_lambda, dtype, place.device)
        spoiled = values.view(-1, 4).clone()
        for row, bad in ((3, torch.nan), (64, torch.inf), (65, -torch.inf), (1023, torch.nan)):
            spoiled[row, row % 4] = bad
        bad_blocks = ~spoiled.isfinite().all(-1)
        with use_backend(place.backend):
            result = prox_nm(spoiled.view(64, 64), reg_lambda, f"{n}:4").view(-1, 4)
        assert same_bits(result[bad_blocks], spoiled[bad_blocks]), f"{n}:4 {dtype}: changed a block that is not finite"
        good = values.view(-1, 4)[~bad_blocks]
        if place.judge:
            what = f"{n}:4 {dtype} next to blocks that are not finite"
            judge_prox(result[~bad_blocks], good, reg_lambda, n, None, what)


@check("prox_nm_")
def empty_and_identity(place: Place) -> None:
    """Nothing to do is done: no weights, or lambda = 0."""
    for n, dtype, reg_lambda in each_prox(place):
        with use_backend(place.backend):
            for shape in ((0, 8), (3, 0), (0,)):
                prox_nm_(torch.empty(shape, dtype=dtype, device=place.device), reg_lambda, f"{n}:4")
            values = hard_weights((8, 16), reg_lambda, dtype, place.device)
            assert same_bits(prox_nm(values, 0.0, f"{n}:4"), values)


@check("prox_nm_")
def deterministic(place: Place) -> None:
    """Twice the same bits."""
    for n, dtype, reg_lambda in each_prox(place):
        values = hard_weights((37, 260) if place.small else (1023, 4100), reg_lambda, dtype, place.device)
        with use_backend(place.backend):
            first, second = (prox_nm(values, reg_lambda, f"{n}:4") for _ in range(2))
        assert same_bits(first, second), f"{n}:4 {dtype}: two runs differ"


@check("prox_nm_", alone=True)
def beyond_31_bits(place: Place) -> None:
    """More than 2^31 bytes in fp32, more than 2^31 elements in bf16: each chunk as if it were alone, and exact."""
    if place.backend == "reference":
        raise Skipped("the reference is what others are compared with")
    for dtype, elements in ((torch.float32, 2**29 + 2**14), (torch.bfloat16, 2**31 + 2**14)):
        needs_memory(place, 2.5 * elements * dtype.itemsize / 1e9)
        for scale in (None, 0.5 + torch.rand(4096, device=place.device)):
            weight = torch.empty(elements // 4096, 4096, dtype=dtype, device=place.device).normal_(0, 0.02)
            before = weight.clone()
            with use_backend(place.backend):
                prox_nm_(weight, 25.0, scale=scale)
            for start in range(0, len(weight), 2**13):
                rows = slice(start, start + 2**13)
                with use_backend(place.backend):
                    alone = prox_nm(before[rows], 25.0, scale=scale)
                # the rows alone are another program, whose additions the compiler may join otherwise
                judge_alike(weight[rows], alone, f"{dtype} rows {start} to {start + 2**13}")
            for rows in (slice(0, 64), slice(len(weight) // 2 - 32, len(weight) // 2 + 32), slice(-64, None)):
                judge_prox(weight[rows], before[rows], 25.0, 2, scale, f"{dtype} {elements} elements")
            del weight, before, alone


@check("prox_nm_list_")
def whole_list(place: Place) -> None:
    """Weights of many shapes and lambdas in one call: exact, and as from one call each, between guards."""
    for dtype in place.dtypes:
        needs(place, "prox_nm_list_", torch.zeros(1, 4, dtype=dtype, device=place.device), 2, 4)
        shapes = [*place.shapes, (0, 8), (2, 4), *[(3, 8 * k) for k in range(1, 6 if place.small else 60)]]
        lambdas = [(0.05, 0.7, 0.0, 25.0)[i % 4] for i in range(len(shapes))]
        values = [hard_weights(shapes[i], lambdas[i] or 1.0, dtype, place.device) for i in range(len(shapes))]
        weights = [guarded(value, offset=i % 3 * 4) for i, value in enumerate(values)]
        with use_backend(place.backend):
            prox_nm_list_([weight.tensor for weight in weights], lambdas)
            alone = [prox_nm(value, reg_lambda) for value, reg_lambda in zip(values, lambdas, strict=True)]
        for i, weight in enumerate(weights):
            what = f"{dtype} {list(shapes[i])} lambda={lambdas[i]}"
            weight.assert_intact(what)
            if values[i].numel() and place.judge:
                judge_prox(weight.tensor, values[i], lambdas[i], 2, None, what)
                judge_alike(weight.tensor, alone[i], what)


def judge_alike(a: Tensor, b: Tensor, what: str) -> None:
    """Raises AssertionError unless two calls agree: neighbours in a tile may steer the iteration, not the result."""
    digits = 1e-10 if a.dtype == torch.float64 else 2e-5 + torch.finfo(a.dtype).eps
    wrong = (a.double() - b.double()).abs() > digits * (b.double().abs() + 0.1 * b.double().abs().max())
    assert wrong.sum() <= 4 + TIES * wrong.numel(), (
        f"{what}: {wrong.sum()} of {wrong.numel()} differ from one call each"
    )


@check("nm_mask")
def mask_equals_reference(place: Place) -> None:
    """The very booleans of the reference, ties and NaN included; no element is left unwritten."""
    for n in (1, 2):
        for dtype in place.dtypes:
            score = hard_weights((129, 260), 1.0, dtype, place.device).abs()
            score.view(-1)[::97] = torch.nan
            needs(place, "nm_mask", score, n, 4)
            for part in (score, score[:1], score[3:3], score[::2], score[0, :4]):
                with use_backend(place.backend):
                    mask = nm_mask(part, f"{n}:4")
                assert torch.equal(mask, reference.nm_mask(part.contiguous(), f"{n}:4")), (
                    f"{n}:4 {dtype} {list(part.shape)}"
                )
