"""--plan: its formulas equal what the code allocates and saves; its page; what it refuses."""

import re

import plan_check
import pytest
import torch
from tiny_models import save_tiny_model

from proxsparse import finetune, train
from proxsparse.errors import InputError
from proxsparse.io.model_files import headers
from proxsparse.models.layers import decoder_blocks
from proxsparse.models.loading import load_model
from proxsparse.models.snap import cast_parameters_
from proxsparse.run import folder, job, memory
from proxsparse.run.parse import parse_finetune, parse_train, train_args
from proxsparse.training import loop
from proxsparse.training.distillation import calibration_loss
from proxsparse.training.state import TrainState

PUBLISHED = {  # numbers of weights that the authors state
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "openlm-research/open_llama_7b_v2": 6_738_415_616,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
}
FLAGS = {"device": "cpu", "seq_len": 64, "eval_data": "none"}


def plan_of(model, **flags) -> memory.Plan:
    """The plan of a run of `train` with these flags."""
    return memory.Plan(train_args(model=str(model), **{**FLAGS, **flags}))


def kept_by_blocks(plan: memory.Plan, padding: int = 0) -> int:
    """What the decoder blocks of the real model keep for the backward pass of the real loss, in bytes."""
    model, documents = load_model(plan.args.model.model)[0].train(), plan.args.options.per_device_train_batch_size
    cast_parameters_(model, plan.dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(plan.learns != "prunable" or parameter.ndim == 2)
    ids = torch.randint(4, 260, (documents, plan.tokens))
    mask = torch.ones_like(ids)
    mask[-1, plan.tokens - padding :] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    own, saved, ends = {p.untyped_storage()._cdata for p in model.parameters()}, {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor  # kept alive, so that no address is used twice
        return tensor

    def size() -> int:
        return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own)

    for block in decoder_blocks(model):
        block.register_forward_hook(lambda *_: ends.append(size()))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", plan.autocast, enabled=plan.autocast is not None, cache_enabled=False),
    ):
        calibration_loss(model, batch, 0.0)
    return ends[-1] - ends[0]  # of all but the first, whose end includes the embedding


@pytest.mark.parametrize("model", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16"])
@pytest.mark.parametrize("flags", [{}, {"objective": "paper"}, {"per_device_train_batch_size": 2}], ids=str)
def test_a_block_keeps_what_the_formula_says(model, precision, flags, tmp_path):
    plan = plan_of(save_tiny_model(model, tmp_path), precision=precision, **flags)
    assert len(plan.blocks) == 2
    assert plan.block_bytes() == kept_by_blocks(plan, padding=3 * bool(flags.get("per_device_train_batch_size")))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_known_models_have_the_published_number_of_weights(name):
    assert plan_of(name).weights == PUBLISHED[name]


def data_bytes(folder, names: str = "") -> int:
    """The bytes of the tensors in the safetensors files of a folder whose names match, without the headers."""
    found = headers(sorted(folder.glob("*.safetensors")))
    return sum(header.size for name, header in found.items() if re.match(names, name))


@pytest.mark.parametrize(
    ("command", "name", "flags"),
    [
        ("train", "llama", "--precision fp32"),
        ("train", "gpt2", "--precision mixed --moment_dtype bf16"),
        ("train", "llama", "--precision bf16 --master_weights"),
        ("train", "qwen2", "--precision bf16 --objective paper --frozen_lambda 0.5 --pretrained_weights device"),
        ("train", "mixtral", "--precision fp32 --exclude gate"),
        ("finetune", "llama", "--precision mixed"),
        ("finetune", "llama", "--precision bf16 --held_out 0"),
        ("finetune", "qwen2", "--precision fp32 --train norms"),
    ],
)
def test_a_run_allocates_and_saves_what_the_plan_says(command, name, flags, tmp_path, monkeypatch):
    model, held, update_all, save, move = (
        tmp_path / "model",
        {},
        loop.update_all,
        TrainState.save,
        folder.shard_and_move_,
    )
    save_tiny_model(name, model)
    run = f"{flags} --device cpu --seq_len 32 --num_samples 16 --max_steps 2 --save_steps 1 --eval_data none".split()

    def size(tensors) -> int:
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    def moved(*arguments):
        pretrained = move(*arguments)
        held.setdefault("W0", size(pretrained.values()))  # then that of the teacher
        return pretrained

    def update(state) -> float:
        weights, learned = state.model.parameters(), state.layers.values()
        held["gradients"] = size(p.grad for p in weights if p.grad is not None)
        norm, of = update_all(state), state.optimizer.state.values()
        held["weights"] = size(state.model.parameters())
        held["learned weights"] = size(one.weight for one in learned if one.masked and command == "train")
        held["moments"] = size(entry[key] for entry in of for key in ("exp_avg", "exp_avg_sq"))
        held["master weights"] = size(entry["master"] for entry in of if "master" in entry)
        held["W0 of the frozen-weight term"] = size(entry["pretrained"] for entry in of if "pretrained" in entry)
        held["masks"] = size(one.held for one in learned if command == "finetune")
        held["best weights"] = size(getattr(state.observer, "best", {}).values())
        return norm

    def saved(state, checkpoints):
        save(state, checkpoints)
        names = "(weight|exp_avg|exp_avg_sq|master|best|pretrained)[.]"
        held["checkpoint"] = data_bytes(checkpoints.folder / "step-1", names)

    if command == "finetune":
        few = ["--num_samples", "4", "--seq_len", "16", "--max_steps", "1", "--eval_data", "none"]
        assert train.main(["--model", str(model), *few, "--output_dir", str(tmp_path / "pruned")]) == 0
        arguments, main, parse = [str(tmp_path / "pruned"), *run], finetune.main, parse_finetune
    else:
        arguments, main, parse = ["--model", str(model), *run], train.main, parse_train
    for module, function, replaced in (
        (loop, "update_all", update),
        (TrainState, "save", saved),
        (folder, "shard_and_move_", moved),
    ):
        monkeypatch.setattr(module, function, replaced)
    assert main([*arguments, "--output_dir", str(tmp_path / "run")]) == 0
    device, host, disk = memory.Plan(parse(arguments)).stages(1)["checkpoint"]
    gradients = memory.Plan(parse(arguments)).stages(1)["optimizer"][0]["gradients"]
    assert device.pop(memory.FREED) >= gradients
    planned = memory.joined(device, {"W0": host["W0"], "gradients": gradients, "checkpoint": disk["checkpoints"] // 2})
    assert {what: int(size) for what, size in planned.items()} == held
    result = memory.Plan(parse(arguments)).stages(1)["saving"][2]
    assert result["model and masks"] == data_bytes(tmp_path / "run")


def test_eight_devices_share_what_is_held():
    one, eight = (
        memory.memory(plan_of("meta-llama/Llama-2-7b-hf", device="cuda", gradient_accumulation_steps=2).args, n)[
            "device"
        ]
        for n in (1, 8)
    )
    for name in ("weights", "W0", "learned weights", "moments"):
        assert one[name] == 8 * eight[name] > 0
    assert one["logits"] == eight["logits"]
    assert "gathered" in eight.keys() - one.keys()


def test_malloc_keeps_small_gradients_only(tmp_path, monkeypatch):
    plan = plan_of(save_tiny_model("llama", tmp_path), precision="fp32")
    assert plan.stages(1)["loss"][0][memory.FREED] == 4 * plan.prunable
    monkeypatch.setattr(memory, "MAPPED", 1)
    assert plan.stages(1)["loss"][0][memory.FREED] == 0


def test_a_whole_model_is_saved_in_the_dtype_of_its_files(tmp_path):
    plan = plan_of(save_tiny_model("llama", tmp_path), precision="fp32")
    assert plan.file_dtype == torch.bfloat16
    weights = [plan.stages(devices)["saving"][0]["weights"] for devices in (1, 2)]
    assert weights == [2 * plan.weights, 4 * plan.weights / 2]  # snapping keeps the dtype of shards


@pytest.mark.parametrize("main", [train.main, finetune.main])
def test_the_plan_is_printed_and_nothing_else_happens(main, tmp_path, monkeypatch, capsys):
    model = save_tiny_model("llama", tmp_path / "model")
    monkeypatch.setattr(job, "load_model", None)
    monkeypatch.chdir(tmp_path)
    flags = ["--model", str(model)] if main is train.main else [str(model), "--distill", "0"]
    assert main([*flags, "--plan", "--seq_len", "64", "--eval_data", "none", "--device", "cuda"]) == 0
    printed = capsys.readouterr().out
    assert "2 decoder blocks; 14 layers" in printed
    assert re.search(r"device +moments .*\ndevice", printed)
    assert [line.split()[0] for line in printed.splitlines() if " total " in line] == ["device", "host", "disk"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_without_a_config_is_refused_in_one_line(monkeypatch, capsys):
    def offline(*_arguments, **_keywords):
        raise OSError("no network")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    with pytest.raises(InputError, match=r"'someone/unknown': no network; give a folder with config.json$"):
        train.main(["--model", "someone/unknown", "--plan"])


def test_plan_check_compares_the_plan_with_a_run(monkeypatch, capsys):
    monkeypatch.setattr(plan_check, "peak", lambda arguments: 10**9)
    monkeypatch.setattr(plan_check, "RANDOM", {"max_position_embeddings": 512})
    assert plan_check.main(["--no-save", "--only", "train random"]) == 0
    assert re.search(r"train random --seq_len 512 +0.5\d +1.00", capsys.readouterr().out)
