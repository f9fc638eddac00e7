"""--plan: what it counts is what the real code holds, byte for byte; its page; what it refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import plan_check
import pytest
import scaling_table
import tiny_models
import torch

from proxsparse import train
from proxsparse.data.calibration import IGNORED_LABEL
from proxsparse.errors import InputError
from proxsparse.models.layers import prunable_layers
from proxsparse.models.loading import load_model
from proxsparse.models.snap import cast_parameters_
from proxsparse.plan import architecture as architectures
from proxsparse.plan import page
from proxsparse.plan.activations import LiveBytes
from proxsparse.plan.cost import bytes_received, cost, operations_of_a_document, sensible_devices
from proxsparse.plan.memory import held, moments_of_a_run, on_device, on_host, shape_of, traced
from proxsparse.run.config import TrainConfig
from proxsparse.run.parse import parse_config
from proxsparse.runtime.device import PRECISIONS
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
    """A folder with a model of five decoder blocks, whose vocabulary is not all of it."""
    folder = tiny_models.save_tiny_model("llama", tmp_path_factory.mktemp("deep"))
    settings = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": BLOCKS}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def flags(folder: str, **settings) -> TrainConfig:
    return TrainConfig(model=folder, device="cpu", **{"seq_len": 64, "eval_data": "none", **settings}).check()


def peak_of_a_real_step(config: TrainConfig) -> int:
    """The most that the real passes of a step hold beside the weights, on real tensors with numbers in them."""
    import transformers

    weight_dtype, compute_dtype = PRECISIONS[config.precision]
    loaded = transformers.AutoConfig.from_pretrained(config.model)
    model = transformers.AutoModelForCausalLM.from_config(loaded)
    cast_parameters_(model, weight_dtype)
    layers = prunable_layers(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(config.update == "all" or name.removesuffix(".weight") in layers)
    start_training(model, config.gradient_checkpointing)
    ids = torch.randint(260, (config.per_device_train_batch_size, config.seq_len))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert IGNORED_LABEL not in ids
    with LiveBytes() as live:
        backward(model, [batch] * config.gradient_accumulation_steps, compute_dtype, 0.0)
    return live.peak


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "mixed"},
        {"precision": "fp32", "metric": "none"},
        {"precision": "mixed", "gradient_checkpointing": True},
        {"precision": "fp32", "gradient_checkpointing": True, "metric": "none", "seq_len": 8},
        {"precision": "bf16", "gradient_accumulation_steps": 3},
    ],
    ids=str,
)
def test_the_activations_are_those_of_the_real_code_at_any_depth(deep, settings):
    config = flags(deep, **settings)
    shape = shape_of(config)
    moments = moments_of_a_run(shape, config, traced(shape, config), devices=1)
    planned = max(m["activations"] + m.get("gradients", 0) for name, m in moments.items() if "backward" in name)
    assert planned == pytest.approx(peak_of_a_real_step(config), rel=0.03)


def test_a_model_of_one_block_is_planned_too(deep, tmp_path):
    settings = json.loads((Path(deep) / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = flags(str(tmp_path), precision="fp32")
    shape = shape_of(config)
    assert traced(shape, config).step.until_first == pytest.approx(peak_of_a_real_step(config), rel=0.02)


def test_documents_side_by_side_are_padded_and_need_a_mask(deep):
    config = flags(deep, precision="fp32", per_device_train_batch_size=2)
    shape = shape_of(config)
    assert shape.shallow.config._attn_implementation == "sdpa"
    planned = traced(shape, config).step.until_first + (BLOCKS - 2) * traced(shape, config).step.kept
    assert 1.0 < planned / peak_of_a_real_step(config) < 1.2  # these two need none


def test_the_shape_is_that_of_the_loaded_model(tmp_path):
    for name in ("llama", "gpt2", "phi3"):
        folder = tiny_models.save_tiny_model(name, tmp_path / name)
        shape, model = shape_of(flags(str(folder))), load_model(str(folder))[0]
        layers = prunable_layers(model)
        assert shape.weights == sum(parameter.numel() for parameter in model.parameters())
        assert (shape.layers, shape.prunable) == (len(layers), sum(x.weight.numel() for x in layers.values()))
        assert (shape.blocks, shape.file_bytes) == (2, 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_known_architectures_have_the_published_number_of_weights(name):
    assert sum(p.numel() for p in architectures.architecture(name).model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("settings", "bytes_a_weight"),  # masked weight, learned weight, two moments, masters, W0, start and sum of runs
    [
        ({"precision": "fp32"}, 4 + 4 + 8 + 2),
        ({"precision": "fp32", "forward": "dense"}, 4 + 8),
        ({"precision": "fp32", "moment_dtype": "bf16"}, 4 + 4 + 4 + 2),
        ({"precision": "bf16"}, 2 + 2 + 4 + 2),
        ({"precision": "bf16", "moment_dtype": "fp32"}, 2 + 2 + 8 + 2),
        ({"precision": "bf16", "master_weights": True}, 2 + 2 + 4 + 4 + 2),
        ({"precision": "fp32", "pretrained_weights": "cpu"}, 4 + 4 + 8),
        ({"precision": "bf16", "average_runs": 3}, 2 + 2 + 4 + 2 + 2 + 4),
        ({"precision": "bf16", "metric": "none", "frozen_lambda": 0.5}, 2 + 4 + 2),
    ],
    ids=str,
)
def test_what_is_held_a_weight(deep, settings, bytes_a_weight):
    config = flags(deep, **settings)
    shape = shape_of(config)
    others = held(replace(shape, prunable=0, weights=shape.weights - shape.prunable), config)
    assert sum(held(shape, config).values()) - sum(others.values()) == bytes_a_weight * shape.prunable


def test_devices_share_what_is_held_and_gather_two_blocks(deep):
    config = flags(deep, precision="fp32", metric="none")
    shape = shape_of(config)
    found = traced(shape, config)
    of = {n: moments_of_a_run(shape, config, found, n)["the first decoder block's backward pass"] for n in (1, 4, 8)}
    for name in ("weights", "moments", "gradients"):
        assert of[1][name] == 4 * of[4][name] == 8 * of[8][name] > 0
    outside = shape.weights - BLOCKS * shape.block
    assert of[1]["gathered"] == 0
    assert of[4]["gathered"] == of[8]["gathered"] == 4 * (4 * shape.block + 3 * outside)
    assert of[1]["activations"] == of[8]["activations"]


def test_w0_waits_where_it_is_told(deep):
    for place, host, device in (("cpu", True, False), ("device", False, True), ("disk", False, False)):
        config = flags(deep, pretrained_weights=place, precision="fp32")
        shape = shape_of(config)
        assert ("W0" in on_host(shape, config, 1)) == host
        assert ("W0" in on_device(shape, config, traced(shape, config), 1)[1]) == device


def test_the_masks_of_the_end_wait_in_the_memory_of_the_host(deep):
    """On a CPU, which is its own host, only at their moment."""
    for device, beside in (("cpu", False), ("cuda", True)):
        config = flags(deep, precision="fp32", seq_len=8)
        config.device = device
        shape = shape_of(config)
        moments = moments_of_a_run(shape, config, traced(shape, config), 1)
        masks = {moment: buckets.get("two masks", 0) for moment, buckets in moments.items()}
        assert masks.pop("the perplexity") == (0 if beside else 2 * shape.prunable)
        assert not any(masks.values())
        assert ("two masks, at the end" in on_host(shape, config, 1)) == beside


def test_stepping_in_the_backward_pass_saves_the_gradients(deep):
    config = flags(deep, precision="fp32", seq_len=4)
    eager = replace(config, step_in_backward=True, max_grad_norm=0.0).check()
    shape = shape_of(config)
    peaks = [sum(on_device(shape, c, traced(shape, c), 1)[1].values()) for c in (config, eager)]
    assert peaks[0] > peaks[1]
    assert moments_of_a_run(shape, eager, traced(shape, eager), 1)["the optimizer's step"]["gradients"] == 0


def test_a_large_vocabulary_shows_in_the_loss(deep, tmp_path):
    settings = json.loads((Path(deep) / "config.json").read_text()) | {"vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = flags(str(tmp_path), precision="fp32")
    shape, logits = shape_of(config), 63 * 4096
    assert (
        traced(shape, config).step.until_first > 3 * 4 * logits
    )  # log_softmax, and its gradient before and after it is scattered


# ------------------------------------------------------------------------------------------ cost


def test_the_operations_are_six_a_weight_and_token():
    config = flags("meta-llama/Llama-2-7b-hf", seq_len=4096, metric="none", precision="bf16")
    shape = shape_of(config)
    products = 6 * 4096 * (6_738_415_616 - 32000 * 4096)
    assert operations_of_a_document(shape, config) == pytest.approx(products, rel=0.1)
    again = operations_of_a_document(shape, replace(config, gradient_checkpointing=True))
    assert again / operations_of_a_document(shape, config) == pytest.approx(4 / 3, rel=0.02)
    assert bytes_received(shape, config, 1) == 0
    assert bytes_received(shape, config, 4) == 3 / 4 * 3 * 2 * 6_738_415_616
    one, eight = cost(shape, config, 1), cost(shape, config, 8)
    assert (one.documents, one.steps, eight.documents, eight.steps) == (1, 400, 8, 50)
    assert one.operations == eight.operations
    assert 0.2 < one.seconds < 2
    assert sensible_devices(config)[-1] == 256


# ------------------------------------------------------------------------------------------ the page


def test_the_plan_is_printed_and_nothing_else_happens(deep, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "load_model", None)
    monkeypatch.chdir(tmp_path)
    assert train.main(["--plan", "--model", deep, "--seq_len", "64", "--eval_data", "none"]) == 0
    printed = capsys.readouterr().out
    assert f"{BLOCKS} decoder blocks" in printed
    assert "On a CPU both are one" in printed
    assert max(map(len, printed.splitlines())) <= 140
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_7b_fits_one_gpu_of_80_gb_and_with_the_last_flags_one_of_48():
    config = parse_config(["--recipe", "llama-2-7b", "--device", "cuda", "--plan"])
    printed = page.text(config)
    assert "One 80 GB device: it fits as it is." in printed
    assert "One 48 GB device: it fits with these" in printed
    assert "--step_in_backward true" in printed
    assert "proxsparse's own table" in printed
    last = replace(config, step_in_backward=True, max_grad_norm=0.0).check()
    shape = shape_of(last)
    assert sum(on_device(shape, last, traced(shape, last), 1)[1].values()) < 48e9


def test_what_no_flag_makes_fit_says_how_many_devices_it_takes():
    config = flags("meta-llama/Llama-3.1-70B", seq_len=4096, precision="bf16")
    printed = page.remedies_for(shape_of(config), replace(config, device="cuda"), 80)
    assert "not even with these, which then takes 8 of them" in printed
    for flag in ("--gradient_checkpointing true", "--step_in_backward true", "--forward dense"):
        assert flag in printed


def test_a_model_whose_config_cannot_be_had_is_named(monkeypatch):
    def offline(*_arguments, **_keywords):
        raise OSError("no network")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    with pytest.raises(InputError, match=r"'someone/unknown' cannot be had \(no network\); give a folder"):
        page.text(flags("someone/unknown"))


def test_a_mixture_of_experts_is_refused_with_the_reason(tmp_path):
    folder = tiny_models.save_tiny_model("mixtral", tmp_path)
    with pytest.raises(InputError, match="depends on its data"):
        page.text(flags(str(folder)))


# ------------------------------------------------------------------------------------------ benchmarks and the page


def test_the_table_of_the_page_is_what_the_plan_says():
    printed = scaling_table.PAGE.read_text(encoding="utf-8").partition(scaling_table.BEGIN)[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    name = "meta-llama/Llama-3.2-1B"
    first = [row[0] for row in rows].index(name.partition("/")[2])
    assert rows[first : first + len(scaling_table.DEVICES)] == scaling_table.rows(name)


def test_the_table_is_put_between_its_marks(tmp_path):
    page_file = tmp_path / "page.md"
    page_file.write_text(f"before\n{scaling_table.BEGIN}old\n{scaling_table.END}after\n")
    for _ in range(2):
        scaling_table.write(page_file, "| new |\n")
    expected = f"before\n{scaling_table.BEGIN}\n| new |\n\n{scaling_table.END}after\n"
    assert page_file.read_text() == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_check_sees_the_peak_of_a_process(deep):
    program = "import time; held = bytearray(b'x') * 2**28; del held; time.sleep(0.3)"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        sampled = {}
        plan_check.watch(process.pid, sampled)
    assert 2**28 < sampled["peak_bytes"] < 2**28 + 2**26
    planned = plan_check.plan_of(["--model", deep, "--device", "cpu", "--seq_len", "64", "--eval_data", "none"])
    assert planned["planned_bytes"] == sum(planned["buckets"].values()) > planned["buckets"]["host: process"]
