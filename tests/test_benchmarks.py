"""Every benchmark: its help, one small run whose rows have the fields of the committed ones, and what it counts."""

import importlib
import json
import shlex
from dataclasses import replace
from pathlib import Path

import budget
import commands
import linear_speed
import own_text
import plan_check
import prox_speed
import pytest
import step_operations
import tiny_models
import token_memory
import torch
from commands import QUICK, call, result_of, run
from lib import common, measure, plots, random_models, shapes
from pruned import prune_

from proxsparse import finetune, prune
from proxsparse.data.sources import load_texts
from proxsparse.errors import InputError
from proxsparse.inference.linear import SparseLinear
from proxsparse.models.loading import local_files, read_tokenizer
from proxsparse.ops import choice, registry, unpack_nm
from proxsparse.ops.registry import Kernel

ROOT = Path(common.__file__).parents[1]
COMMITTED = {path.stem: common.read_rows(path) for path in (ROOT / "results").glob("*.jsonl")}
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
RANDOM = "--devices cpu --seconds 0 --repetitions 1"
TRAIN = "--model {model} --data {text} --eval_data {text} --eval_seq_len 32 --eval_max_windows 2 --device cpu "
TRAIN += "--num_samples 4 --seq_len 16"
SMALL = {  # script -> its flags, which may name files that `small_run` makes
    "prox_speed": f"{RANDOM} --shapes 8x32 --models tiny --lambdas 25 --patterns 2:4 6:8",
    "optimizer_step": f"{RANDOM} --model tiny --blocks 2",
    "linear_speed": f"{RANDOM} --shapes 64x64 --rows 1 512",
    "generate_speed": "--devices cpu --models tiny --modes eager --prompt 4 --new_tokens 3 --batches 2",
    "training_speed": "--devices cpu --model tiny --steps 3 --flags '--seq_len 32'",
    "solver_quality": "--hard --instances 4 --lambdas 3",
    "compare_methods": f"{TRAIN} --methods dense magnitude wanda+sensitivity --work_dir {{folder}}/work",
    "studies": f"constraints {TRAIN} --max_steps 2 --output_dir {{folder}}/out",
    "bits_quality": "--model {model} --masks a={folder}/pruned a={folder}/wider --calibrate {text} --eval_data {text} "
    "--eval_seq_len 32",
    "plan_check": "--only 'train random'",
    "token_memory": "--documents 2 3",
    "step_operations": "--layers 1 --cases 'mixed, distill, compile'",
    "serve_speed": "--model tiny --layers 1 --batches 3 --prompts 8 --new_tokens 2 --repetitions 2 --device cpu",
}
SLOW = {"bits_quality", "generate_speed", "serve_speed", "solver_quality", "step_operations"}
DRAWN = {"prox_speed", "linear_speed", "generate_speed", "solver_quality", "studies", "bits_quality"}
OTHER_ROWS = {"note", "task", "curve", "parts"}  # fields of rows that the small runs do not have
EARLIER = {"scaling", "forward"}  # fields of rows of studies before --objective alone chose the mode


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    """benchmark -> the rows that it has saved so far, in a folder of the test."""
    monkeypatch.setattr(common, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    monkeypatch.setattr(common, "commit", lambda: "0123456789ab")
    monkeypatch.setitem(shapes.MODELS, "tiny", shapes.Model(2, 8, 4, 16))
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 2**16)
    yield lambda name: common.read_rows(tmp_path / f"{name}.jsonl")
    choice.clear_cache()


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name, capsys):
    module = importlib.import_module(name)
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:adamw_prox_. not on the cpp backend")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in SMALL])
def test_small_run(name, rows_of, tmp_path, monkeypatch, capsys):
    for package in ("fastapi", "uvicorn") if name == "serve_speed" else ():
        pytest.importorskip(package)
    if name == "step_operations" and not (step_operations.CUDA / "include").is_dir():
        pytest.skip("no headers of CUDA")
    if importlib.util.find_spec("torchao") is None:
        bits_quality = importlib.import_module("bits_quality")
        monkeypatch.setattr(bits_quality, "round_dense_", lambda layers, bits: float(bits))
    for module in (plan_check, token_memory):  # of processes of their own, which take minutes
        monkeypatch.setattr(module, "peak", lambda arguments: 10**9)
    model = tiny_models.save_tiny_model("llama", tmp_path / "model", hidden_size=64)
    for pattern, folder in (("2:4", tmp_path / "pruned"), ("6:8", tmp_path / "wider")):
        tiny_models.save(prune_(tiny_models.tiny_model("llama", hidden_size=64), pattern=pattern), folder)
    text = tiny_models.save_texts(tmp_path / "text.jsonl")
    flags = SMALL[name].format(model=model, text=text, folder=tmp_path)
    assert not importlib.import_module(name).main(shlex.split(flags))
    rows, printed = rows_of(name), capsys.readouterr().out
    assert rows
    assert all(row["commit"] == "0123456789ab" for row in rows)
    assert str(tmp_path) not in json.dumps(rows)  # no folder of this machine
    committed = [row for row in COMMITTED[name] if not (OTHER_ROWS | {"gpu"}) & row.keys()] or rows
    assert committed[-1].keys() - EARLIER <= set().union(*rows)
    assert printed.count("\n") > len(rows)  # a table
    assert bool(list(tmp_path.rglob("*.png"))) >= (name in DRAWN)


def test_the_budget_of_runs_that_continue_each_other(rows_of, tiny_llama, text_file, tmp_path, capsys):
    pruned, tuned = tmp_path / "pruned", tmp_path / "tuned"
    run(prune.main, tiny_llama, text_file, pruned, "--method", "wanda")
    shared = ["--data", text_file, "--eval_data", text_file, "--eval_seq_len", "32", *QUICK]
    call(finetune.main, pruned, "--distill", "0", "--output_dir", tuned, *shared)
    budget.main([str(pruned), f"{pruned}+{tuned}"])
    alone, both = rows_of("budget")
    assert (alone["path"], both["path"]) == ("wanda", "wanda, then finetune")
    assert (alone["values"], both["values"]) == ("pretrained", "updated")
    assert both["minutes"] > alone["minutes"] > 0
    assert both["perplexity"] == result_of(tuned)["perplexity"]["finetune"]
    assert both["model"] == tiny_llama.name
    assert "wanda, then finetune  updated" in capsys.readouterr().out
    assert (tmp_path / "budget_tiny-llama_2of4.png").exists()
    unmeasured = commands.pruned(tiny_llama, tmp_path / "unmeasured")
    with pytest.raises(InputError, match="unmeasured: its perplexity was not measured; run it with --eval_data"):
        budget.main([str(unmeasured)])


def test_own_text_is_drawn_from_the_distribution_of_the_model(text_file, tmp_path, capsys):
    """Whatever settings of generation the model has: none of them, and no end of text, changes or ends it."""
    model = tiny_models.save_tiny_model("llama", tmp_path / "model")
    sizes, drawn = ["--documents", "3", "--tokens", "12", "--prompt", "5", "--batch", "2", "--device", "cpu"], []
    settings = {"temperature": 0.01, "top_p": 0.1, "repetition_penalty": 1.5, "eos_token_id": list(range(20))}
    for each in ({}, settings):
        (model / "generation_config.json").write_text(json.dumps(each))
        own_text.main([str(model), str(text_file), f"{tmp_path}/own.jsonl", *sizes])
        drawn.append(load_texts(f"{tmp_path}/own.jsonl", "train"))
    assert "own.jsonl: 36 tokens in " in capsys.readouterr().out
    assert drawn[0] == drawn[1]
    tokenizer, joined = read_tokenizer(*local_files(str(model))), "\n\n".join(load_texts(str(text_file), "train"))
    prompts = [tokenizer.decode(tokenizer(sample).input_ids[:5]) for sample in drawn[0]]
    assert len(set(drawn[0])) == 3
    assert all(prompt in joined for prompt in prompts)


@pytest.mark.slow
def test_families(capsys):
    call(importlib.import_module("families").main, "llama", "dbrx", "bert")
    printed = capsys.readouterr().out
    assert "llama {}" in printed
    assert "works with --precision fp32" in printed
    assert "pack {'works': 2}" in printed


def test_committed_rows_are_drawn():
    pytest.importorskip("matplotlib")
    assert all(getattr(plots, name)(COMMITTED[name]) for name in ("prox_speed", "linear_speed", "bits_quality"))
    assert plots.generate_speed([row for row in COMMITTED["generate_speed"] if "note" not in row])
    for name in {row["study"] for row in COMMITTED["studies"]}:
        rows = [row for row in COMMITTED["studies"] if row["study"] == name]
        assert plots.curves(rows, "") if name in plots.CURVES else plots.perplexities(rows, "")


def breaks(*arguments):
    raise RuntimeError("no such\nkernel")


def test_what_fails_gets_a_note(rows_of, monkeypatch, capsys):
    """A broken backend or case costs its own rows, and the exit code is 1."""
    broken = Kernel("cpp", breaks, supports=lambda *arguments: None)
    monkeypatch.setitem(registry._kernels, "prox_nm_", registry._kernels["prox_nm_"] | {"cpp": broken})
    flags = ["--shapes", "8x32", "--models", "--dtypes", "float32", "--lambdas", "1", "--slow_weights", "0"]
    assert prox_speed.main([*RANDOM.split(), *flags]) == 1
    assert {row["kernel"]: row.get("note") for row in rows_of("prox_speed")} == {
        "copy": None,
        "cpp": "RuntimeError: no such kernel",
    }
    monkeypatch.setattr(prox_speed, "benchmark", breaks)
    assert prox_speed.main([*RANDOM.split(), *flags]) == 1
    assert "failed: 8x32, 2:4, in float32: RuntimeError: no such kernel" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- packed layers

KERNELS = dict(registry._kernels["sparse_linear"])


def only(monkeypatch, *others: Kernel) -> None:
    """These kernels of sparse_linear and the reference are all there are."""
    named = {kernel.backend: kernel for kernel in (KERNELS["reference"], *others)}
    monkeypatch.setitem(registry._kernels, "sparse_linear", named)


def new(run) -> Kernel:
    return Kernel("new", run, supports=lambda *arguments: None)


def right(x, values, indices, bias, prepared, scales):
    return x @ unpack_nm(values, indices).T


LAST = torch.tensor([-1])
WRONG = {
    "wrong: its error is": lambda *arguments: right(*arguments).index_put((LAST, LAST), torch.ones(1), accumulate=True),
    "wrong: its error is nan": lambda *arguments: right(*arguments) * torch.nan,
}


@pytest.mark.parametrize("note", WRONG)
def test_a_wrong_backend_gets_a_note_and_no_time(note, rows_of, monkeypatch):
    only(monkeypatch, new(WRONG[note]))
    flags = "--bits 16 --shapes 16x64 --rows 7 --dtypes float32"
    assert linear_speed.main(f"{RANDOM} {flags}".split()) == 1
    (found,) = (row["note"] for row in rows_of("linear_speed") if row["backend"] == "new" and "p50_ms" not in row)
    assert found.startswith(note)


def row(backend: str, ms: float, **others) -> dict:
    """A row of linear_speed.jsonl."""
    where = {"device": "a CPU", "torch": "2.13", "commit": "abc", "command": "python b.py", "when": "2026-01-02"}
    point = {"device_kind": "cpu", "dtype": "float32", "weights": "8x16", "rows": 4, "state": "cold"}
    return where | point | {"backend": backend, "p50_ms": ms, "times_dense": 1 / ms} | others


def test_the_table_of_auto_holds_the_fastest_by_the_newest_row_of_each_backend(monkeypatch):
    committed = linear_speed.choice_table(common.read_rows(common.results_file("linear_speed")))
    assert json.loads(json.dumps(committed)) == json.loads(choice.MEASURED.read_text())
    only(monkeypatch, *(replace(new(None), backend=name) for name in ("a", "b")))
    rows = [
        row("a", 1.0, when="2026-01-01", commit="old"),
        *(row("a", 3.0), row("b", 2.0), row("reference", 4.0), row("dense", 0.1), row("b:prepared", 0.3)),
        *(row("a", 5.0, rows=16), row("reference", 4.0, rows=16), row("gone", 1.0, rows=16)),
        row("b", 9.0, rows=32, when="2026-01-01", times_dense=2.0),  # measured alone, on a busy machine
        *(row("a", 5.0, rows=32, times_dense=1.5), row("reference", 8.0, rows=32, times_dense=0.9)),
        row("a", 0.1, state="warm"),
        {key: value for key, value in row("reference", 1.0).items() if key != "p50_ms"} | {"note": "wrong"},
    ]
    table = linear_speed.choice_table(rows)["cpu"]["float32"]
    assert table["fastest"] == {"8x16": {"4": "b > a > reference", "16": "reference", "32": "b > a > reference"}}
    assert table["measured"]["commit"] == "abc"


def test_both_forms_of_a_random_model_have_the_same_weights():
    given = "tiny", 3, torch.float32, torch.device("cpu")
    dense, sparse = (random_models.random_model(*given, form) for form in (False, True))
    packed = {name: layer for name, layer in sparse.named_modules() if isinstance(layer, SparseLinear)}
    assert len(packed) == 7 * 3
    assert all(torch.equal(layer.dense_weight(), dense.get_submodule(name).weight) for name, layer in packed.items())
    tensors = [*dense.parameters(), *dense.buffers(), *sparse.parameters(), *sparse.buffers()]
    assert not any(tensor.is_meta or tensor.isnan().any() for tensor in tensors)
    tokens = torch.randint(260, (2, 9))
    torch.testing.assert_close(sparse(tokens).logits, dense(tokens).logits)
