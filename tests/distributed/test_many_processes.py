"""One, two and four processes learn the same masks; each holds only its rows, however few there are."""

import numpy as np
import pytest
from commands import result_of, rows_in
from safetensors.torch import load_file
from tiny_models import save_tiny_model

from proxsparse.io.mask_files import load_masks

ACCUMULATED = {1: 4, 2: 2, 4: 1}  # processes -> passes a step, so that all take the same four samples
ALL_SHARDINGS = ((2, 1, []), (4, 1, []), (4, 2, ["--shard_within_node"]))
CASES = {  # name -> flags; (processes, nodes, more flags) to compare with one process
    "short": ("--max_steps 3", ((2, 1, []), (2, 1, ["--pretrained_weights", "disk"]))),
    "stored": ("--packing true --num_samples 30000 --max_steps 12", ALL_SHARDINGS),  # the tokens are in a file
    "masked": ("--distill 0.5", ALL_SHARDINGS),
    "hidden": ("--match_hidden 16 --distill 0.5 --max_steps 3", ((2, 1, ["--pretrained_weights", "disk"]),)),
    "compiled": ("--compile --distill 0.5 --packing true --max_steps 3", ((2, 1, []),)),
    "paper": ("--objective paper --frozen_lambda 0.2 --gradient_checkpointing", ALL_SHARDINGS),
    # eight tokens a document and one of eight experts for each: every process has other idle experts
    "experts": ("--seq_len 8 --objective paper --reg_lambda_rel 0.1 --max_steps 3", ((2, 1, []),)),
}


def learned(forks, run_dir, flags, processes, nodes=1):
    """result.json, the rows of metrics.jsonl, and the masks as one array of bits."""
    log = run_dir.with_suffix(".log")
    arguments = [*flags, "--gradient_accumulation_steps", ACCUMULATED[processes], "--output_dir", run_dir]
    assert forks.run(arguments, processes, nodes, log) == [0] * processes, log.read_text()[-2000:]
    result = result_of(run_dir)
    rows = rows_in(run_dir / "metrics.jsonl")
    bits = np.concatenate([mask.numpy().ravel() for mask in load_masks(run_dir / "masks.safetensors").values()])
    return result, rows, bits


@pytest.mark.parametrize("case", ["short", *(pytest.param(name, marks=pytest.mark.slow) for name in [*CASES][1:])])
def test_the_same_masks(forks, flags, tmp_path, case):
    more, shardings = CASES[case]
    flags = [*flags, *more.split()]
    if case == "experts":
        flags += ["--model", save_tiny_model("mixtral", tmp_path / "m", num_local_experts=8, num_experts_per_tok=1)]
    alone, rows, bits = learned(forks, tmp_path / "1", flags, 1)
    of_two = set()
    for number, (processes, nodes, more) in enumerate(shardings):
        run_dir = tmp_path / f"sharded-{number}"
        result, its_rows, its_bits = learned(forks, run_dir, [*flags, *more], processes, nodes)
        assert (bits == its_bits).mean() >= 0.999
        for one, other in zip(rows, its_rows, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
            assert one["tokens"] == other["tokens"]
            assert one["feasible_share"] == pytest.approx(other["feasible_share"], abs=1e-3)
        for name in ("dense", "magnitude", "proxsparse"):
            assert result["perplexity"][name] == pytest.approx(alone["perplexity"][name], rel=1e-4)
        assert (result["weights"], result["world_size"]) == (alone["weights"], processes)
        pruned, whole = load_file(run_dir / "model.safetensors"), load_file(tmp_path / "1" / "model.safetensors")
        assert {name: weight.shape for name, weight in pruned.items()} == {n: w.shape for n, w in whole.items()}
        if case != "experts":  # an expert is a layer in masks.safetensors, but no tensor in model.safetensors
            for name, mask in load_masks(run_dir / "masks.safetensors").items():
                assert not pruned[f"{name}.weight"][~mask].any()
        of_two |= {result["masks_sha256"]} if processes == 2 else set()
    assert len(of_two) == 1, "shards mapped from the files give the same bits"


@pytest.mark.slow
def test_each_process_holds_its_share_of_weights_and_moments(forks, flags, few_rows, tmp_path):
    sizes = {}
    for processes in (1, 2, 4):
        run_dir = tmp_path / str(processes)
        arguments = [*flags, "--output_dir", run_dir, "--save_steps", "1", "--max_steps", "4"]
        killed = ("proxsparse.io.checkpoints.finish", 2, "kill")  # killed in the second save: the first one stays
        assert -9 in forks.run(arguments, processes, before=killed)
        files = sorted((run_dir / "checkpoints" / "step-1").glob("*.safetensors"))
        held = [sum(t.nbytes for n, t in load_file(f).items() if n.startswith(("weight", "exp"))) for f in files]
        assert len(held) == processes
        sizes[processes] = held
    model = load_file(few_rows / "model.safetensors")
    assert sum(sizes[1]) == 12 * sum(w.numel() for n, w in model.items() if "_proj" in n)  # v, two moments in fp32
    for processes in (2, 4):
        assert sum(sizes[processes]) == sum(sizes[1])
        assert max(sizes[processes]) <= 1.1 * sum(sizes[1]) / processes


def test_a_folder_that_not_all_processes_see_is_refused(forks, flags, tmp_path):
    """As on the nodes of a cluster without a shared disk: each process works in a folder of its own."""
    folders = [str(tmp_path / rank) for rank in "01"]
    for folder in folders:
        (tmp_path / folder).mkdir()
    codes = forks.run([*flags, "--output_dir", "run"], 2, output=tmp_path / "log", folders=folders)
    assert codes[0] == 2
    words = "1 of 2 processes do not see the files that rank zero writes there; give a folder"
    assert words in (tmp_path / "log").read_text()


@pytest.mark.parametrize("more", ["--data nothing.jsonl", "--include nothing.jsonl", "--nothing.jsonl"])
def test_errors_of_all_processes_are_printed_once(more, forks, flags, tmp_path):
    """Of rank zero alone, of each process, and of each process before it joins the others."""
    log = tmp_path / "log"
    assert forks.run([*flags, *more.split(), "--output_dir", tmp_path / "run"], 2, output=log) == [2, 2]
    text = log.read_text()
    assert text.count("error: ") == 1
    assert "nothing.jsonl" in text
    assert "Traceback" not in text


def test_the_error_of_another_process_than_the_first_is_printed(forks, flags, few_rows, tmp_path):
    """Only the first process finds the model."""
    arguments, log = [*flags, "--model", "./few-rows", "--output_dir", tmp_path / "run"], tmp_path / "log"
    codes = forks.run(arguments, 2, output=log, folders=[str(few_rows.parent), str(tmp_path)])
    assert codes[1] == 2
    text = log.read_text()
    assert text.count("few-rows': no such file or folder") == text.count("another process of this run has ended") == 1
