"""--plan: its formulas are close to what the code allocates and saves; its page; what it refuses."""

import re
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from commands import call, pruned
from tiny_models import save_texts, save_tiny_model

from proxsparse import finetune, prune, train
from proxsparse.errors import InputError
from proxsparse.io.model_files import headers
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.models.loading import load_model
from proxsparse.models.snap import cast_parameters_
from proxsparse.run import job, memory
from proxsparse.run import result as run_result
from proxsparse.run.parse import parse_finetune, parse_train, train_args
from proxsparse.training import loop
from proxsparse.training.loss import training_loss
from proxsparse.training.state import TrainState


def plan_of(model, **flags) -> memory.Plan:
    """The plan of a run of `train` with these flags."""
    return memory.Plan(train_args(model=str(model), **{"device": "cpu", "seq_len": 64, **flags}))


def bytes_of(tensors) -> int:
    """The bytes of tensors, of which several may share a storage."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16"])
@pytest.mark.parametrize("objective", ["masked", "paper"])
def test_a_block_keeps_about_what_the_formula_says(model, precision, objective, tmp_path):
    plan, saved, ends = plan_of(save_tiny_model(model, tmp_path), precision=precision, objective=objective), [], []
    model = load_model(plan.args.model.model)[0].train()
    cast_parameters_(model, plan.dtype)
    for layer in prunable_layers(model, "2:4").values() if plan.masked_size(1) < plan.dtype.itemsize else ():
        layer.weight.data = layer.weight.detach().to(plan.autocast)
    for parameter in model.parameters():
        parameter.requires_grad_(objective == "paper" or parameter.ndim == 2)
    ids, own = torch.randint(4, 260, (1, plan.window)), {p.untyped_storage()._cdata for p in model.parameters()}
    for block in decoder_blocks(model):
        block.register_forward_hook(
            lambda *_: ends.append(bytes_of(t for t in saved if t.untyped_storage()._cdata not in own))
        )
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.autocast("cpu", plan.autocast, enabled=plan.autocast is not None, cache_enabled=False),
    ):
        training_loss(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    kept = ends[-1] - ends[0]  # of all but the first, whose end includes the embedding
    assert len(plan.blocks) == 2
    assert 0.95 * kept < plan.block_bytes(1) < 1.3 * kept


@pytest.mark.parametrize(
    ("command", "name", "flags"),
    [
        ("train", "gpt2", "--precision mixed --moment_dtype bf16"),
        ("train", "llama", "--precision bf16 --master_weights"),
        ("train", "qwen2", "--precision mixed"),
        ("train", "qwen2", "--precision mixed --gradient_accumulation_steps 2"),  # gradients are summed in fp32
        ("train", "qwen2", "--precision bf16 --objective paper --frozen_lambda 0.5 --pretrained_weights device"),
        ("finetune", "llama", "--precision mixed"),
        ("finetune", "qwen2", "--precision fp32"),
    ],
)
def test_a_run_allocates_and_saves_what_the_plan_says(command, name, flags, tmp_path, monkeypatch):
    model, held, update_all = save_tiny_model(name, tmp_path / "model"), {}, loop.update_all

    def update(state, read) -> float:
        held["gradients"] = bytes_of(p.grad for p in state.model.parameters() if p.grad is not None)
        norm, entries, learned = update_all(state, read), state.optimizer.state.values(), state.layers.values()
        held["weights"] = bytes_of(state.model.parameters())
        held["learned weights"] = bytes_of(one.weight for one in learned if one.masked and command == "train")
        held["moments"] = bytes_of(entry[key] for entry in entries for key in ("exp_avg", "exp_avg_sq"))
        held["master weights"] = bytes_of(entry["master"] for entry in entries if "master" in entry)
        held["W0 of the frozen-weight term"] = bytes_of(e["pretrained"] for e in entries if "pretrained" in e)
        held["masks"] = bytes_of(one.held for one in learned if command == "finetune")
        held["best weights"] = bytes_of(getattr(state.observer, "best", {}).values())
        return norm

    run, main, parse = ["--model", str(model)], train.main, parse_train
    if command == "finetune":
        run, main, parse = [str(pruned(model, tmp_path / "pruned"))], finetune.main, parse_finetune
    run += f"{flags} --device cpu --seq_len 32 --num_samples 16 --max_steps 2 --eval_data none".split()
    monkeypatch.setattr(loop, "update_all", update)
    call(main, *run, "--output_dir", tmp_path / "run")
    planned = memory.Plan(parse(run)).memory()
    assert {what: planned["host"].get(what, 0) for what in held} == held
    written = headers(sorted((tmp_path / "run").glob("*.safetensors"))).values()
    assert planned["disk"]["model and masks"] == sum(header.size for header in written)


def test_eight_devices_share_what_is_held(tiny_llama):
    plan = plan_of(tiny_llama, device="cuda", gradient_accumulation_steps=2, precision="fp32")
    one, eight = (plan.memory(count)["device"] for count in (1, 8))
    for name in ("weights", "W0", "learned weights", "moments"):
        assert one[name] == 8 * eight[name] > 0
    assert one["logits"] == eight["logits"]
    assert "gathered" in eight.keys() - one.keys()


def test_the_plan_has_the_larger_parts_of_the_loss_on_a_gpu(tiny_llama, monkeypatch):
    flags = {"device": "cuda", "precision": "fp32", "per_device_train_batch_size": 8}  # 512 tokens
    plan = plan_of(tiny_llama, **flags)
    all_rows = plan.memory()["device"]["logits"]
    monkeypatch.setattr("proxsparse.training.loss.GPU_BYTES", 0)
    assert all_rows - plan.memory()["device"]["logits"] == 2 * 4 * (512 - 256) * plan.vocabulary


@pytest.mark.parametrize("main", [train.main, finetune.main])
def test_the_plan_is_printed_and_nothing_else_happens(main, tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "load_model", None)
    monkeypatch.chdir(tmp_path)
    flags = ["--model", tiny_llama] if main is train.main else [tiny_llama, "--distill", "0"]
    call(main, *flags, "--plan", "--seq_len", "64", "--device", "cuda")
    printed = capsys.readouterr().out
    assert "2 decoder blocks; 14 layers" in printed
    assert re.search(r"device +moments .*\ndevice", printed)
    assert [line.split()[0] for line in printed.splitlines() if " total " in line] == ["device", "host", "disk"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.8, r"GB on the host, where 1\.\d\d GB are free; with --per_device_train_batch_size 1 it needs 0\.\d\d GB"),
        (0.001, "are free; use a smaller model; --plan lists"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_before_it_loads(share, message, tmp_path, monkeypatch):
    model = save_tiny_model("llama", tmp_path / "model", vocab_size=50000)
    flags = ["--model", str(model), "--seq_len", "128", "--per_device_train_batch_size", "8", "--device", "cpu"]
    flags += ["--output_dir", str(tmp_path / "run"), "--precision", "mixed"]  # auto depends on the CPU
    needed = memory.total(memory.Plan(parse_train(flags)).memory()["host"])
    monkeypatch.setattr(memory, "free_memory", lambda device: {"host": share * needed})
    monkeypatch.setattr(job, "load_model", None)
    with pytest.raises(InputError, match=message):
        train.main(flags)
    with pytest.raises(InputError) as refused:  # names no flag that this command does not have
        prune.main(["--method", "wanda", "--finetune", *flags])
    assert not re.search("plan|torchrun|pretrained_weights", str(refused.value))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("device", "place", "share", "processes", "message"),
    [
        ("cpu", "host", 1, (4, 4), "use fewer processes on this machine, or a smaller model"),
        ("cpu", "host", 4, (4, 4), None),
        ("cpu", "host", 2, (4, 2), None),  # on two machines
        ("cuda", "host", 3.04, (4, 4), None),  # the model for saving is on the host of one of them: 3.03, not 4
        ("cuda", "host", 1, (4, 4), "use fewer processes on this machine"),
        ("cuda", "device", 0.4, (1, 1), r"--gradient_checkpointing and torchrun on \d+ devices it needs 0.\d\d GB on"),
        ("cuda", "device", 0.001, (4, 4), "are free; use a smaller model"),
        ("cpu", "disk", 0.8, (1, 1), "free some space, or choose another --output_dir; or give --save_minutes 0"),
        ("cpu", "disk", 1, (1, 1), None),
    ],
)
def test_the_memory_of_every_process_and_the_disk_are_compared(
    device, place, share, processes, message, tmp_path, monkeypatch
):
    """`share`: what is free, relative to the plan of one process with as many in all."""
    model = save_tiny_model("llama", tmp_path / "model", num_hidden_layers=12)
    args = parse_train(["--model", str(model), "--seq_len", "32", "--device", device, "--pretrained_weights", "disk"])
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(memory, "CUDA_CONTEXT", 0)
    monkeypatch.setattr(memory, "PROCESS", 0)
    free = share * memory.total(memory.Plan(args).memory(processes[0])[place])
    monkeypatch.setattr(memory, "free_memory", lambda device: {place: free} if place != "disk" else {})
    held = int(free / 2) if place == "disk" else 0
    (tmp_path / "run" / "file").write_bytes(bytes(held))  # of the run that is resumed
    usage = SimpleNamespace(free=free - held if place == "disk" else 10**15)
    monkeypatch.setattr(memory, "disk_usage", lambda path: usage)
    raises = pytest.raises(InputError, match=message) if message else nullcontext()
    with raises:
        memory.require_memory(args, torch.device(device), tmp_path / "run", *processes)


def test_the_free_memory_is_known():
    assert 10**8 < memory.free_memory(torch.device("cpu"))["host"] < 10**14


def test_a_model_without_a_plan_is_not_checked(tiny_llama, monkeypatch):
    flags = parse_train(["--model", str(tiny_llama)])
    monkeypatch.setattr(memory, "Plan", lambda args: args.no_such_flag)
    memory.require_memory(flags, torch.device("cpu"), tiny_llama)


def test_the_learning_state_is_freed_before_the_perplexity_is_measured(tmp_path, monkeypatch):
    """A model that just fits while it learns has no room for both."""
    learned, alive = [], []

    def recorded(self, *args, made=TrainState.__init__, **options):
        made(self, *args, **options)
        learned.extend(map(weakref.ref, (self, self.optimizer)))

    def scores(*args, measured=run_result.scores_under):
        alive.append([reference() for reference in learned])
        return measured(*args)

    monkeypatch.setattr(TrainState, "__init__", recorded)
    monkeypatch.setattr(run_result, "scores_under", scores)
    model, text = save_tiny_model("llama", tmp_path / "model"), save_texts(tmp_path / "text.jsonl", documents=9)
    flags = f"--data {text} --eval_data {text} --eval_seq_len 32 --seq_len 32 --num_samples 4 --output_dir"
    assert train.main(["--model", str(model), "--distill", "0.5", *flags.split(), str(tmp_path / "a")]) == 0
    assert finetune.main([str(tmp_path / "a"), *flags.split(), str(tmp_path / "b")]) == 0
    assert alive == [[None] * 2, [None] * 4]
