"""The benchmarks of packed layers and models at tiny sizes: their rows, what they count, and the table of `auto`."""

from dataclasses import replace
from types import SimpleNamespace

import generate_speed
import linear_speed
import pytest
import torch
import training_speed
from lib import common, cusparselt, measure, plots, random_models
from lib.codes import dense_fp8, dense_int8, dequantized_rows

from proxsparse.inference.linear import SparseLinear
from proxsparse.models.layers import decoder_blocks
from proxsparse.ops import choice, quantize_nm, registry, unpack_nm
from proxsparse.ops.backends.cutlass_codes import FP8, INT8, fp8_weight
from proxsparse.ops.registry import Kernel
from proxsparse.reference.pack import check_packed

CPU = torch.device("cpu")
KERNELS = dict(registry._kernels["sparse_linear"])
QUICK = ["--devices", "cpu", "--seconds", "0", "--repetitions", "1"]
TINY = ["--devices", "cpu", "--models", "tiny", "--modes", "eager", "--prompt", "4", "--new_tokens", "3"]


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    """benchmark -> its saved rows; rows and pictures go to a folder of the test."""
    monkeypatch.setattr(common, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 2**16)
    yield lambda name: common.read_rows(tmp_path / f"{name}.jsonl")
    choice.clear_cache()


def test_random_packed_weights_are_valid_and_use_every_pair_of_places():
    for in_features in (4, 24, 64):
        values, indices = measure.packed_weight((96, in_features), torch.bfloat16, CPU, sigma=1.0)
        check_packed(values, indices)
        weight = unpack_nm(values, indices)
        assert weight.shape == (96, in_features)
        assert ((weight != 0).view(-1, 4).double().mean(0) - 0.5).abs().max() < 0.25


def test_linear_speed_saves_a_row_for_dense_and_every_backend_that_supports_the_call(rows_of, tmp_path, capsys):
    page = tmp_path / "page.md"
    flags = ["--shapes", "16x64", "64x24", "--rows", "1", "512", "--states", "cold", "warm", "--table", str(page)]
    assert linear_speed.main([*QUICK, "--bits", "16", *flags]) == 0
    rows = rows_of("linear_speed")
    x, values = torch.empty(1, 64), torch.empty(16, 32)
    served = {"dense", *(name for name, kernel in KERNELS.items() if kernel.supports(x, values) is None)}
    assert {"dense", "reference"} <= served
    cases = {(row["weights"], row["dtype"], row["rows"], row["state"], row["backend"]) for row in rows}
    assert len(cases) == len(rows) == 2 * 2 * 2 * 2 * len(served)
    assert {row["backend"] for row in rows} == served
    for row in rows:
        size = 2 if row["dtype"] == "bfloat16" else 4
        out_features, in_features = map(int, row["weights"].split("x"))
        weight = out_features * in_features * size
        if row["backend"] != "dense":
            weight = weight // 2 + out_features * -(-in_features // 8)
        assert row["bytes"] == weight + size * row["rows"] * (in_features + out_features)
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["p50_ms"] / 1e6)
        operations = 2 * row["rows"] * in_features * out_features
        assert row["tflop_per_s"] == pytest.approx(operations / row["p50_ms"] / 1e9)
        assert row["limit"] in ("memory", "compute")
        assert row["device_kind"] == choice.device_kind(CPU)
        assert row["command"].startswith("python3 benchmarks/linear_speed.py --devices cpu")
        assert row["times_dense"] == 1 or row["backend"] != "dense"
    assert sum(row["auto"] for row in rows) == 2 * 2 * 2 * 2
    assert (tmp_path / "linear_speed_cpu.png").stat().st_size > 1000
    assert page.read_text().count("\n|") == len(rows) + 2
    assert "times dense" in capsys.readouterr().out


def test_dense_products_of_codes():
    """What CUTLASS's products of codes are compared with on a GPU."""
    values, indices = measure.packed_weight((96, 384), torch.bfloat16, CPU, sigma=0.02)
    x = torch.randn(20, 384).bfloat16()
    kinds = [(INT8, dense_int8, quantize_nm(values, 8))]
    if torch.__version__ >= "2.13":  # older ones multiply by scales of rows only on GPUs
        kinds.append((FP8, dense_fp8, fp8_weight(values)))
    for kind, multiply, (codes, scales) in kinds:
        exact = dequantized_rows(kind, x) @ unpack_nm(codes.double() * scales.double(), indices).T
        y = multiply(x, unpack_nm(codes.float(), indices).to(kind.dtype), scales)
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=exact.abs().max().item() / 128)


def test_layers_with_8_and_4_bits_and_their_peers(rows_of):
    pytest.importorskip("proxsparse._C", reason="the compiled extension is missing")
    assert linear_speed.main([*QUICK, "--shapes", "64x128", "--rows", "3", "--backends"]) == 0
    rows = {(row["dtype"], row["backend"]): row for row in rows_of("linear_speed")}
    ours, peers = {"dense", "cpp:8", "cpp:4"}, {"torch:8", "torch:4"}
    assert rows.keys() == {(dtype, name) for dtype in ("bfloat16", "float32") for name in ours} | {
        ("bfloat16", name) for name in peers
    }
    x_and_y, scales, places = 2 * 3 * (64 + 128), 2 * 64, 64 * 16
    sizes = {name: rows["bfloat16", name]["bytes"] - x_and_y for name in ours | peers}
    assert (sizes["cpp:8"], sizes["cpp:4"]) == (64 * 64 + places + scales, 64 * 32 + places + 2 * scales)
    assert (sizes["torch:8"], sizes["torch:4"]) == (64 * 128 + scales, 64 * 64 + 4 * scales)


def right(x, values, indices, bias, prepared):
    return x @ (unpack_nm(values, indices) if prepared is None else prepared).T


def broken(*arguments):
    raise RuntimeError("no such\nkernel")


def only(monkeypatch, *others: Kernel) -> None:
    """These kernels of sparse_linear and the reference are all there are."""
    named = {kernel.backend: kernel for kernel in (KERNELS["reference"], *others)}
    monkeypatch.setitem(registry._kernels, "sparse_linear", named)


def new(run, **more) -> Kernel:
    return Kernel("new", run, supports=lambda x, values: None, **more)


LAST = torch.tensor([-1])
WRONG = {
    "wrong: its error is": lambda *arguments: right(*arguments).index_put((LAST, LAST), torch.ones(1), accumulate=True),
    "wrong: its error is nan": lambda *arguments: right(*arguments) * torch.nan,
    "RuntimeError: no such kernel": broken,
}


@pytest.mark.parametrize("note", WRONG)
def test_a_wrong_backend_gets_a_note_and_no_time(note, rows_of, monkeypatch, capsys):
    only(monkeypatch, new(WRONG[note]))
    assert (
        linear_speed.main([*QUICK, "--bits", "16", "--shapes", "16x64", "--rows", "1", "7", "--dtypes", "float32"]) == 1
    )
    rows = [row for row in rows_of("linear_speed") if row["backend"] == "new"]
    assert len(rows) == 2
    assert all(row["note"].startswith(note) and "p50_ms" not in row for row in rows)
    assert note in capsys.readouterr().out


def test_a_backend_that_prepares_something_is_measured_with_and_without_it(rows_of, monkeypatch):
    handed = set()

    def linear(x, values, indices, bias, prepared):
        handed.add(prepared is not None)
        return right(x, values, indices, bias, prepared)

    only(monkeypatch, new(linear, prepare=unpack_nm))
    assert linear_speed.main([*QUICK, "--bits", "16", "--shapes", "16x64", "--rows", "7", "--dtypes", "float32"]) == 0
    assert handed == {False, True}
    rows = {row["backend"]: row for row in rows_of("linear_speed")}
    assert rows.keys() == {"dense", "reference", "new", "new:prepared"}
    assert not rows["new:prepared"]["auto"]
    rows["new:prepared"]["times_dense"] = 1e9
    assert "e+09" not in linear_speed.summary(list(rows.values()))


def test_cusparselt_gets_the_split_of_its_search_and_x_is_padded_only_if_needed(monkeypatch):
    """The library is replaced: torch's schema and shapes are those of its own meta tensors. x is copied to add rows."""
    calls, searched = [], []

    def mm_search(compressed, columns, bias, alpha, out_dtype, transpose_result, /):
        searched.append((columns.shape[1], bias, alpha, out_dtype, transpose_result))
        return 3, len(searched) + 1, 1, 9

    def multiply(compressed, columns, **arguments):
        y = torch.ops.aten._cslt_sparse_mm(compressed.to("meta"), columns.to("meta"), **arguments)
        calls.append((columns.data_ptr(), arguments["alg_id"], arguments["split_k"], arguments["split_k_mode"]))
        return (columns.t() @ compressed.t()).view(y.shape)

    monkeypatch.setattr(cusparselt, "is_supported", lambda weight: True)
    monkeypatch.setattr(torch._C, "_cusparselt", SimpleNamespace(mm_search=mm_search), raising=False)
    monkeypatch.setattr(torch, "_cslt_compress", torch.clone)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    weights = measure.LinearWeights.random((32, 48), torch.bfloat16, CPU, 0.02, [13])
    (found,) = cusparselt.contender(weights).values()
    for rows in (8, 13, 8):
        assert weights.error_of(found.call(weights.x[:rows]), rows, found.weight) <= weights.tolerance(0)
    assert searched == [(8, None, None, None, True), (16, None, None, None, True)]
    assert [call[1:] for call in calls] == [(3, 2, 1), (3, 3, 1), (3, 2, 1)]
    assert [call[0] == weights.x.data_ptr() for call in calls] == [True, False, True]


def test_what_was_measured_before_the_context_ended_is_kept(rows_of, monkeypatch):
    """After an illegal access every call of the process raises, dense and copying too."""
    calls, error = [], "CUDA error: an illegal memory access was encountered"

    def ends_the_context(x, values, indices, bias, prepared):
        if len(x) > 1:
            calls.append(len(x))
            raise RuntimeError(error)
        return right(x, values, indices, bias, prepared)

    def measured(*arguments):
        if calls:
            raise RuntimeError(error)
        return measure.interleaved(*arguments)

    monkeypatch.setattr(linear_speed, "interleaved", measured)
    only(monkeypatch, new(ends_the_context))
    flags = ["--shapes", "16x64", "--rows", "1", "7", "--dtypes", "float32", "--backends", "new"]
    assert linear_speed.main([*QUICK, "--bits", "16", *flags]) == 1
    rows = {(row["rows"], row["backend"]): row for row in rows_of("linear_speed")}
    assert {key for key, row in rows.items() if "p50_ms" in row} == {(1, "dense"), (1, "new")}
    assert all("illegal memory access" in rows[7, name]["note"] for name in ("dense", "new"))


def test_processes_of_one_time_share_a_picture(rows_of, monkeypatch):
    monkeypatch.setenv("PROXSPARSE_WHEN", "2026-01-01T00:00:00+00:00")
    drawn = []
    monkeypatch.setattr(plots, "linear_speed", lambda rows: drawn.append([row["backend"] for row in rows]))
    for names in ([], ["reference"]):
        linear_speed.main(
            [*QUICK, "--bits", "16", "--shapes", "16x64", "--rows", "2", "--dtypes", "float32", "--backends", *names]
        )
    assert drawn == [["dense"], ["dense", "dense", "reference"]]
    assert {row["when"] for row in rows_of("linear_speed")} == {"2026-01-01T00:00:00+00:00"}


def test_what_cannot_be_measured_is_refused(capsys):
    for text in ("64", "64x", "64x66", "ax4"):
        with pytest.raises(SystemExit):
            linear_speed.main(["--shapes", text])
        assert "in_features a multiple of 4" in capsys.readouterr().err
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        generate_speed.main([*TINY, "--modes", "graph"])
    with pytest.raises(ValueError, match="must be at least 2"):
        generate_speed.main([*TINY, "--new_tokens", "1"])


def row(backend: str, ms: float, **others) -> dict:
    """A row of linear_speed.jsonl."""
    where = {"device": "a CPU", "torch": "2.13", "commit": "abc", "command": "python b.py", "when": "2026-01-02"}
    point = {"device_kind": "cpu", "dtype": "float32", "weights": "8x16", "rows": 4, "state": "cold"}
    return where | point | {"backend": backend, "p50_ms": ms} | others


def test_the_table_of_auto_holds_the_fastest_of_the_newest_run(monkeypatch):
    only(monkeypatch, *(replace(new(None), backend=name) for name in ("a", "b")))
    rows = [
        row("a", 1.0, when="2026-01-01", commit="old"),
        *(row("a", 3.0), row("b", 2.0), row("reference", 4.0), row("dense", 0.1), row("cusparselt:16", 0.2)),
        row("b:prepared", 0.3),
        *(row("a", 5.0, rows=16), row("reference", 4.0, rows=16), row("gone", 1.0, rows=16)),
        row("a", 0.1, state="warm"),
        row("b", 7.0, weights="8x8", dtype="bfloat16", commit="def"),
        {key: value for key, value in row("reference", 0).items() if key != "p50_ms"} | {"note": "wrong"},
    ]
    origin = {"device": "a CPU", "torch": "2.13", "command": "python b.py"}
    origin |= {"results": "benchmarks/results/linear_speed.jsonl"}
    fastest = {"8x16": {"4": "b > a > reference", "16": "reference"}}
    assert linear_speed.choice_table(rows)["cpu"] == {
        "bfloat16": {"measured": origin | {"commit": "def"}, "fastest": {"8x8": {"4": "b > reference"}}},
        "float32": {"measured": origin | {"commit": "abc"}, "fastest": fastest},
    }


def test_update_choice_writes_what_auto_reads(rows_of, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(choice, "MEASURED", tmp_path / "measured.json")
    with pytest.raises(ValueError, match="measure first"):
        linear_speed.main(["--update_choice"])
    linear_speed.main([*QUICK, "--bits", "16", "--shapes", "16x64", "--rows", "1", "64", "--dtypes", "float32"])
    linear_speed.main(["--update_choice"])
    assert f"{choice.device_kind(CPU)}, float32: 1 shapes" in capsys.readouterr().out
    for rows in (1, 64):
        found = [row for row in rows_of("linear_speed") if row["rows"] == rows and row["backend"] != "dense"]
        x, values = torch.empty(rows, 64), torch.empty(16, 32)
        assert choice.choose(x, values).backend == min(found, key=lambda row: row["p50_ms"])["backend"]


def test_both_forms_of_a_random_model_have_the_same_weights():
    dense, sparse = (random_models.random_model("tiny", 3, torch.float32, CPU, form) for form in (False, True))
    packed = {name: layer for name, layer in sparse.named_modules() if isinstance(layer, SparseLinear)}
    assert len(decoder_blocks(sparse)) == 3
    assert len(packed) == 7 * 3
    assert all(torch.equal(layer.dense_weight(), dense.get_submodule(name).weight) for name, layer in packed.items())
    tensors = [*dense.parameters(), *dense.buffers(), *sparse.parameters(), *sparse.buffers()]
    assert not any(tensor.is_meta or tensor.isnan().any() for tensor in tensors)
    tokens = torch.randint(260, (2, 9))
    torch.testing.assert_close(sparse(tokens).logits, dense(tokens).logits)


@pytest.mark.parametrize(  # with embeddings, norms and biases
    ("name", "parameters"), [("mistral-7b-v0.1", 7_241_732_096), ("qwen2.5-14b", 14_770_033_664)]
)
def test_the_shapes_are_those_of_the_published_models(name, parameters, monkeypatch):
    monkeypatch.setattr(random_models, "fill_layers_", lambda *arguments: None)
    monkeypatch.setattr(random_models, "fill_rest_", lambda *arguments: None)
    model = random_models.random_model(name, None, torch.bfloat16, CPU, sparse=False)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_generate_speed_saves_a_row_for_each_form_mode_and_batch(rows_of, tmp_path, capsys):
    page = tmp_path / "page.md"
    flags = ["--batches", "1", "2", "--dtypes", "float32", "bfloat16", "--repetitions", "2", "--table", str(page)]
    generate_speed.main([*TINY, *flags, "--layers", "2", "--forms", "dense", "sparse"])
    rows = rows_of("generate_speed")
    cases = {(row["dtype"], row["batch"], row["mode"], row["form"]) for row in rows}
    assert len(cases) == len(rows) == 2 * 2 * 2
    weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    for row in rows:
        size = 2 if row["dtype"] == "bfloat16" else 4
        biases = 2 * (64 + 2 * 32) * size
        of_dense = weights * size if row["form"] == "dense" else weights * size // 2 + weights // 8
        assert row["layer_bytes"] == of_dense + biases
        assert row["decode_tokens_per_s"] == pytest.approx(1000 * row["batch"] / row["p50_ms"])
        assert row["prefill_tokens_per_s"] == pytest.approx(1000 * row["batch"] * 4 / row["prefill_p50_ms"])
        assert row["same_tokens"] == 1 or row["dtype"] == "bfloat16"
        assert row["decode_times_dense"] == 1 or row["form"] != "dense"
        assert row["layers"] == 2
        assert row["commit"]
    assert (tmp_path / "generate_speed_cpu.png").stat().st_size > 1000
    assert page.read_text().count("\n|") == len(rows) + 2
    assert "decode" in capsys.readouterr().out


def test_a_case_that_fails_is_a_note_and_rows_name_the_backends(rows_of, capsys, monkeypatch):
    monkeypatch.setitem(generate_speed.MODES, "compile", broken)
    flags = ["--batches", "1", "--dtypes", "float32", "--forms", *generate_speed.FORMS]
    generate_speed.main([*TINY, *flags, "--modes", "eager", "compile"])
    found = {(row["mode"], row["form"]): row for row in rows_of("generate_speed")}
    assert {form for mode, form in found if mode == "eager"} == {*generate_speed.FORMS}
    notes = {form: row.get("note", "") for (mode, form), row in found.items() if mode == "compile"}
    assert notes.keys() == {*generate_speed.FORMS}
    assert all("RuntimeError: no such kernel" in note for note in notes.values())
    assert "failed: RuntimeError" in capsys.readouterr().out
    served = choice.choose(torch.empty(4, 64), torch.empty(64, 32)).backend
    for form in generate_speed.FORMS:
        row = found["eager", form]
        assert row["same_tokens"] == 1 or form.startswith(("sparse8", "sparse4"))
        assert row["prefill_backends"] == ([served] if form.startswith("sparse") else ["dense"])


def test_training_speed_learns_every_form_and_compares_it_with_the_plan(rows_of, capsys):
    flags = ["--model", "tiny", "--steps", "3", "--flags", "--seq_len 32", "--devices", "cpu"]
    assert training_speed.main(flags) == 0
    rows = {row["case"]: row for row in rows_of("training_speed")}
    assert rows.keys() == training_speed.CASES.keys()
    for row in rows.values():
        assert len(row["losses"]) == 3
        assert all(loss == pytest.approx(5.56, abs=0.3) for loss in row["losses"])  # ln 260: nothing is known
        assert row["tokens_per_s"] == pytest.approx(32 / row["step_seconds"])
        assert row["peak_bytes"] > row["planned_bytes"] > 0  # on a CPU the peak is that of all of this process
    paper, stepped = rows["paper, checkpointing"], rows["paper, checkpointing, step in backward"]
    assert stepped["planned_bytes"] < paper["planned_bytes"]
    assert stepped["losses"] == pytest.approx(paper["losses"], rel=1e-2)  # except for clipping
    assert rows["masked, checkpointing"]["items"]["learned weights"] > 0
    assert "A rehearsal" in capsys.readouterr().out


def test_training_speed_compares_a_step_with_fine_tuning(rows_of, capsys):
    flags = ["--model", "tiny", "--steps", "4", "--flags", "--seq_len 32 --distill 0.5", "--devices", "cpu"]
    assert training_speed.main(["--contenders", *flags]) == 0
    rows = {row["case"]: row for row in rows_of("training_speed")}
    assert rows.keys() == training_speed.CONTENDERS.keys()
    assert rows[training_speed.BASE]["ratio"] == 1
    assert {"forward and backward", "masked weights", "optimizer"} < rows["mask learning"]["parts"].keys()
    assert all(min(row["parts"].values()) > 0 and row["turns"] == 2 for row in rows.values())
    assert "against fine-tuning" in capsys.readouterr().out


def test_a_device_that_is_too_small_costs_one_row(rows_of, monkeypatch, capsys):
    def runs_out(*_arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(training_speed, "measure", runs_out)
    assert training_speed.main(["--devices", "cpu", "--model", "tiny", "--cases", "paper"]) == 0
    assert rows_of("training_speed")[0]["note"] == "CUDA out of memory"
    assert "CUDA out of memory" in capsys.readouterr().out
