"""--plan: its figures equal the memory of the real code, byte for byte; its page; what it refuses."""

import itertools
import json
import re
import sys
from functools import partial

import plan_check
import pytest
import scaling_table
import tiny_models
import torch
from torch.profiler import ProfilerActivity, profile

from proxsparse import NMPattern, train
from proxsparse.errors import InputError
from proxsparse.models.layers import prunable_layers
from proxsparse.models.loading import load_model
from proxsparse.models.snap import cast_parameters_
from proxsparse.plan import page
from proxsparse.plan.activations import LiveBytes
from proxsparse.plan.cost import cost
from proxsparse.plan.memory import Plan
from proxsparse.run import job
from proxsparse.run.config import TrainConfig
from proxsparse.run.parse import parse_config
from proxsparse.training.distillation import calibration_loss
from proxsparse.training.learnable_layer import LearnableLayer
from proxsparse.training.loop import backward, start_training

BLOCKS = 5
PUBLISHED = {  # numbers of weights that the authors state
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "openlm-research/open_llama_7b_v2": 6_738_415_616,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """deep(**settings) -> the config of a model with five decoder blocks and these settings, as a folder."""
    folder = tiny_models.save_tiny_model("llama", tmp_path_factory.mktemp("deep"))
    settings = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": BLOCKS}

    def write(**others) -> str:
        (folder / "config.json").write_text(json.dumps(settings | others))
        return str(folder)

    return write


def plan_of(folder: str, **settings) -> Plan:
    """The plan of a run with these flags."""
    return Plan(TrainConfig(model=folder, **{"device": "cpu", "seq_len": 64, "eval_data": "none"} | settings).check())


def peak_of_a_real_step(plan: Plan) -> int:
    """The peak of the real passes of one step on real tensors, without the weights."""
    import transformers

    config = plan.config
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config.model))
    cast_parameters_(model, plan.dtypes[0])
    layers = prunable_layers(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(config.update == "all" or name.removesuffix(".weight") in layers)
    start_training(model, config.gradient_checkpointing)
    ids = torch.randint(260, (config.per_device_train_batch_size, config.seq_len))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with LiveBytes() as live:
        backward(
            model,
            [batch] * config.gradient_accumulation_steps,
            plan.dtypes[1],
            partial(calibration_loss, model, distill=0.0),
        )
    return live.peak


def planned_step(plan: Plan) -> int:
    """What the plan says of the same."""
    phases = [buckets for name, buckets in plan.phases(1).items() if "backward" in name]
    return max(buckets["activations"] + buckets.get("gradients", 0) for buckets in phases)


TIED = {"vocab_size": 4096, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("settings", "of_the_model"),
    [
        ({"precision": "bf16"}, {}),
        ({"precision": "mixed"}, {}),
        ({"precision": "fp32", "objective": "paper"}, {}),
        ({"precision": "mixed", "gradient_checkpointing": True}, {}),
        ({"precision": "fp32", "gradient_checkpointing": True, "objective": "paper", "seq_len": 8}, {}),
        ({"precision": "bf16", "gradient_accumulation_steps": 3}, {}),
        ({"precision": "fp32"}, {"num_hidden_layers": 1}),
        ({"precision": "fp32"}, {"vocab_size": 4096}),
        ({"precision": "fp32", "objective": "paper"}, TIED),
        ({"precision": "fp32", "objective": "paper", "seq_len": 4}, TIED),
        ({"precision": "bf16", "objective": "paper", "gradient_accumulation_steps": 2}, {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_the_activations_are_those_of_the_real_code_at_any_depth(deep, settings, of_the_model):
    plan = plan_of(deep(**of_the_model), **settings)
    assert planned_step(plan) == pytest.approx(peak_of_a_real_step(plan), rel=0.03)


def peak_of_a_new_mask(pattern: str, dtype: torch.dtype, file_dtype: torch.dtype) -> float:
    """The peak in bytes per weight of the tensors that a new mask of a layer needs."""
    layer = torch.nn.Linear(512, 256, bias=False, dtype=dtype)
    pretrained, weight = layer.weight.detach().to(file_dtype), torch.nn.Parameter(layer.weight.detach().clone())
    one = LearnableLayer(layer, weight, pretrained, torch.rand(512), NMPattern.parse(pattern))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        one.remask_()
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(0, *itertools.accumulate(sizes, initial=0)) / weight.numel()


@pytest.mark.filterwarnings("ignore:.* not on the cpp backend")
@pytest.mark.parametrize("file_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "2:8"])
def test_the_memory_of_a_new_mask_is_that_of_the_real_code(deep, pattern, precision, file_dtype):
    plan = plan_of(deep(dtype=file_dtype), precision=precision, pattern=pattern)
    planned = plan.phases(1)["the optimizer step"]["new mask of one layer"] / plan.shape.largest_layer
    measured = peak_of_a_new_mask(pattern, plan.dtypes[0], getattr(torch, file_dtype))
    assert planned == pytest.approx(measured, rel=0.2, abs=0.01)


def test_several_documents_are_padded_and_need_a_mask(deep):
    plan = plan_of(deep(), precision="fp32", per_device_train_batch_size=2)
    assert 1.0 < planned_step(plan) / peak_of_a_real_step(plan) < 1.2  # these two need none


def test_the_shape_is_that_of_the_loaded_model(tmp_path):
    for name in ("llama", "gpt2", "phi3"):
        folder = tiny_models.save_tiny_model(name, tmp_path / name)
        shape, model = plan_of(str(folder)).shape, load_model(str(folder))[0]
        layers = prunable_layers(model)
        assert shape.weights == sum(parameter.numel() for parameter in model.parameters())
        assert (shape.layers, shape.prunable) == (len(layers), sum(x.weight.numel() for x in layers.values()))
        assert (shape.blocks, shape.file_bytes) == (2, 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_known_architectures_have_the_published_number_of_weights(name):
    assert plan_of(name).shape.weights == PUBLISHED[name]


@pytest.mark.parametrize(
    ("settings", "bytes_per_weight"),  # masked weight, learned weight, two moments, masters, W0, start and sum of runs
    [
        ({"precision": "fp32"}, 4 + 4 + 8 + 2),
        ({"precision": "fp32", "forward": "dense"}, 4 + 8),
        ({"precision": "fp32", "moment_dtype": "bf16"}, 4 + 4 + 4 + 2),
        ({"precision": "bf16"}, 2 + 2 + 4 + 2),
        ({"precision": "bf16", "moment_dtype": "fp32"}, 2 + 2 + 8 + 2),
        ({"precision": "bf16", "master_weights": True}, 2 + 2 + 4 + 4 + 2),
        ({"precision": "fp32", "pretrained_weights": "cpu"}, 4 + 4 + 8),
        ({"precision": "bf16", "objective": "paper", "frozen_lambda": 0.5}, 2 + 4 + 2),
    ],
    ids=str,
)
def test_bytes_per_prunable_weight(deep, settings, bytes_per_weight):
    plan = plan_of(deep(), **settings)
    held, shape = sum(plan.held().values()), plan.shape
    prunable, shape.prunable, shape.weights = shape.prunable, 0, shape.weights - shape.prunable
    assert held - sum(plan.with_flags().held().values()) == bytes_per_weight * prunable


def test_what_devices_hold_and_gather(deep):
    plan = plan_of(deep(), precision="fp32", objective="paper")
    of = {n: plan.phases(n)["the backward pass of the first decoder block"] for n in (1, 4, 8)}
    for name in ("weights", "moments", "gradients"):
        assert of[1][name] == 4 * of[4][name] == 8 * of[8][name] > 0
    outside = plan.shape.weights - BLOCKS * plan.shape.block
    assert of[1]["gathered"] == 0
    assert of[4]["gathered"] == of[8]["gathered"] == 4 * (4 * plan.shape.block + 3 * outside)
    assert of[1]["activations"] == of[8]["activations"]
    plan = plan_of(deep(), precision="fp32", seq_len=4)
    in_backward = plan.with_flags(step_in_backward=True, max_grad_norm=0.0)
    assert plan.device_bytes(1) > in_backward.device_bytes(1)
    assert in_backward.phases(1)["the optimizer step"]["gradients"] == 0


def test_w0_and_masks_are_on_the_device_or_on_the_host(deep):
    for place, host, device in (("cpu", True, False), ("device", False, True), ("disk", False, False)):
        plan = plan_of(deep(), pretrained_weights=place, precision="fp32")
        assert ("W0" in plan.on_host(1), "W0" in plan.on_device(1)[1]) == (host, device)
    for device, on_host in (("cpu", False), ("cuda", True)):
        plan = plan.with_flags(device=device)
        masks = {phase: buckets.get("masks", 0) for phase, buckets in plan.phases(1).items()}
        assert masks.pop("the perplexity") == (0 if on_host else 2 * plan.shape.prunable)
        assert not any(masks.values())
        assert ("masks, at the end" in plan.on_host(1)) == on_host


def test_the_operations_are_six_per_weight_and_token():
    plan = plan_of("meta-llama/Llama-2-7b-hf", seq_len=4096, objective="paper", precision="bf16")
    one, eight = cost(plan, 1), cost(plan, 8)
    assert one.operations == eight.operations == pytest.approx(6 * 4096 * (6_738_415_616 - 32000 * 4096), rel=0.1)
    again = cost(plan.with_flags(gradient_checkpointing=True), 1).operations
    assert again / one.operations == pytest.approx(4 / 3, rel=0.02)
    assert (one.network, eight.network) == (0, 7 / 8 * 3 * 2 * 6_738_415_616)
    assert (one.documents, one.steps, eight.documents, eight.steps) == (1, 400, 8, 50)
    assert 0.2 < one.seconds < 2


def test_the_plan_is_printed_and_nothing_else_happens(deep, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "load_model", None)
    monkeypatch.chdir(tmp_path)
    assert train.main(["--plan", "--model", deep(), "--seq_len", "64", "--eval_data", "none"]) == 0
    printed = capsys.readouterr().out
    assert f"{BLOCKS} decoder blocks" in printed
    assert "Total on a CPU" in printed
    assert "\n      256 " in printed  # devices; 512 would take more than the 400 documents
    assert "\n      512 " not in printed
    assert max(map(len, printed.splitlines())) <= 140
    assert list(tmp_path.iterdir()) == []


def test_the_page_lists_flags_that_save_memory_and_the_cards_that_are_then_enough():
    printed = page.text(parse_config(["--recipe", "llama-2-7b", "--device", "cuda", "--plan"]))
    assert "proxsparse's table" in printed
    before, after = (line for line in printed.splitlines() if " x " in line and " GB" in line)
    assert before.split() == ["as", "given", "54.84", "1", "x", "80", "GB"]
    assert after.startswith("  --step_in_backward true --max_grad_norm 0.0  43.71  1 x 48 GB  ")
    masked = plan_of("meta-llama/Llama-3.1-70B", seq_len=4096, precision="bf16", device="cuda")
    given, *lines = page.remedies(masked).splitlines()
    assert given.split() == ["as", "given", "831.11", "none"]
    names = ["gradient_checkpointing", "pretrained_weights", "step_in_backward", "objective"]
    assert [line.split()[0] for line in lines] == [f"--{name}" for name in names]
    assert " 4 x 141 GB " in lines[-1]


def test_a_missing_config_and_a_mixture_of_experts_are_refused_with_the_reason(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="depends on its data"):
        page.text(TrainConfig(model=str(tiny_models.save_tiny_model("mixtral", tmp_path)), device="cpu").check())

    def offline(*_arguments, **_keywords):
        raise OSError("no network")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    with pytest.raises(InputError, match=r"'someone/unknown' from its config \(no network\); give a folder"):
        page.text(TrainConfig(model="someone/unknown", device="cpu").check())


def test_the_table_of_the_docs_is_what_the_plan_says(tmp_path, monkeypatch):
    def rows(text: str) -> list[list[str]]:
        return [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]

    page_file, documented = tmp_path / "page.md", rows(scaling_table.PAGE.read_text(encoding="utf-8"))
    page_file.write_text(f"before\n{scaling_table.BEGIN}old\n{scaling_table.END}after\n")
    monkeypatch.setattr(scaling_table, "PAGE", page_file)
    monkeypatch.setattr(scaling_table, "MODELS", ["meta-llama/Llama-3.2-1B"])
    for _ in range(2):
        assert scaling_table.main(["--write"]) == 0
    written = page_file.read_text()
    assert written.startswith(f"before\n{scaling_table.BEGIN}\n|")
    assert written.endswith(f"|\n\n{scaling_table.END}after\n")
    of_the_model = rows(written)[2:]  # after header and rule
    start = documented.index(of_the_model[0])
    assert documented[start : start + len(scaling_table.DEVICES)] == of_the_model


def test_the_check_compares_runs_in_one_and_in_several_processes(deep, monkeypatch, capsys):
    """With numbers in place of the trainings: every process of a large model measures 3 GB, of the tiny one 1 GB."""

    def peaks(flags: str, processes: int = 0) -> dict[str, list[int]]:
        return dict.fromkeys(("resident", "learning", "end"), [10**9 if "/tiny" in flags else 3 * 10**9] * processes)

    monkeypatch.setattr(plan_check, "peaks", peaks)
    monkeypatch.setattr(plan_check, "MODEL", (64, 3))
    planned = [plan_check.shared_run(plan_check.PAPER, processes)["planned"] for processes in (1, 4)]
    weights = 2 * 260 * 64 + 3 * (4 * 64 * 64 + 3 * 64 * 168 + 2 * 64) + 64
    assert 20 * weights < planned[0] < 22 * weights  # weights, W0, moments and gradients of 4 bytes each; activations
    assert planned[1] < planned[0]
    monkeypatch.setattr(plan_check, "peaks", lambda flags: peaks(flags, 1))
    monkeypatch.setattr(plan_check, "WHOLE", f"{plan_check.SHORT}--model {deep()} --num_samples 4 --eval_data none ")
    assert plan_check.main(["--no-save", "--only", "step_in_backward"]) == 0
    printed = capsys.readouterr().out
    assert re.search("whole run +--precision bf16 --step_in_backward --max_grad_norm 0 +562 ", printed)
    assert "3,000" in printed
    assert "The plan is within 8" in printed  # 0.56 GB of a process and next to nothing


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_check_trains_in_two_processes(monkeypatch):
    monkeypatch.setattr(plan_check, "MODEL", (128, 4))
    row = plan_check.shared_run("", 2)
    assert len(row["measured"]) == len(row["end"]) == 2
    assert min(row["measured"]) > 0.5 * row["planned"] > 10**6
