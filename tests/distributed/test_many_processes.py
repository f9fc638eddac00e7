"""One, two and four processes learn the same masks; each holds its rows alone, however few there are."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_tiny_model

from proxsparse.io.mask_files import load_masks

ACCUMULATED = {1: 4, 2: 2, 4: 1}  # processes -> passes a step, so that all take the same four samples


def learned(forks, run_dir, flags, processes, *more, nodes=1):
    """result.json, the rows of metrics.jsonl, and the masks as one array of bits."""
    log = run_dir.with_suffix(".log")
    arguments = [*flags, "--gradient_accumulation_steps", ACCUMULATED[processes], "--output_dir", run_dir, *more]
    assert forks.run(arguments, processes, nodes, log) == [0] * processes, log.read_text()[-2000:]
    result = json.loads((run_dir / "result.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    bits = np.concatenate([mask.numpy().ravel() for mask in load_masks(run_dir / "masks.safetensors").values()])
    return result, rows, bits


FORMS = {
    "masked": ["--distill", "0.5", "--average_runs", "2"],
    "paper": ["--objective", "paper", "--frozen_lambda", "0.2", "--gradient_checkpointing"],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_masks(forks, flags, tmp_path, form):
    alone, rows, bits = learned(forks, tmp_path / "1", flags, 1, *FORMS[form])
    for processes, nodes, more in ((2, 1, []), (4, 1, []), (4, 2, ["--shard_within_node"])):
        run_dir = tmp_path / f"{processes}-{nodes}"
        result, its_rows, its_bits = learned(forks, run_dir, flags, processes, *FORMS[form], *more, nodes=nodes)
        assert (bits == its_bits).mean() >= 0.999
        assert len(its_rows) == len(rows)
        for one, other in zip(rows, its_rows, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
            assert one["tokens"] == other["tokens"]
            assert one["feasible_share"] == pytest.approx(other["feasible_share"], abs=1e-3)
        for name in ("dense", "magnitude", "proxsparse"):
            assert result["perplexity"][name] == pytest.approx(alone["perplexity"][name], rel=1e-4)
        assert result["weights"] == alone["weights"]
        assert result["world_size"] == processes
        pruned, masks = load_file(run_dir / "model.safetensors"), load_masks(run_dir / "masks.safetensors")
        whole = load_file(tmp_path / "1" / "model.safetensors")
        assert {name: weight.shape for name, weight in pruned.items()} == {n: w.shape for n, w in whole.items()}
        for name, mask in masks.items():
            assert not pruned[f"{name}.weight"][~mask].any()


def test_each_process_holds_its_share_of_weights_and_moments(forks, flags, few_rows, tmp_path):
    sizes = {}
    for processes in (1, 2, 4):
        run_dir = tmp_path / str(processes)
        step = [("proxsparse.training.checkpoint.finish"), 2]  # killed in the second save, so that the first one stays
        arguments = [*flags, "--output_dir", run_dir, "--save_steps", "1", "--max_steps", "4"]
        assert -9 in forks.run(arguments, processes, die_in=step)
        files = sorted((run_dir / "checkpoint-1").glob("*.safetensors"))
        held = [sum(t.nbytes for n, t in load_file(f).items() if n.startswith(("weight", "exp"))) for f in files]
        assert len(held) == processes
        sizes[processes] = held
    weights = sum(mask.numel() for mask in load_masks_of(few_rows))
    assert sum(sizes[1]) == 12 * weights  # v and two moments, in fp32
    for processes in (2, 4):
        assert sum(sizes[processes]) == sum(sizes[1])
        assert max(sizes[processes]) <= 1.1 * sum(sizes[1]) / processes


def load_masks_of(folder):
    """Something with a `numel` for every layer that is pruned."""
    return [w for name, w in load_file(folder / "model.safetensors").items() if "_proj" in name]


def test_experts_that_idle_take_the_prox_all_the_same(forks, flags, tmp_path):
    """Eight tokens a document and one of eight experts for each: in every process others are idle."""
    model = save_tiny_model("mixtral", tmp_path / "model", num_local_experts=8, num_experts_per_tok=1)
    short = [
        *flags,
        "--model",
        model,
        "--seq_len",
        "8",
        "--objective",
        "paper",
        "--reg_lambda_rel",
        "0.1",
        "--max_steps",
        "3",
    ]
    runs = [learned(forks, tmp_path / str(n), short, n) for n in (1, 2)]
    assert (runs[0][2] == runs[1][2]).mean() >= 0.999
    for one, other in zip(runs[0][1], runs[1][1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["feasible_share"] == pytest.approx(other["feasible_share"], abs=1e-3)


def test_a_folder_that_not_all_processes_see_is_refused(forks, flags, tmp_path):
    """As on the nodes of a cluster without a shared disk: here each process takes another folder for the same one."""
    log = tmp_path / "log"
    for rank in "01":
        (tmp_path / rank).mkdir()
    codes = forks.run([*flags, "--output_dir", "run"], 2, output=log, folders=[str(tmp_path / rank) for rank in "01"])
    assert codes[0] == 2
    assert "1 of 2 processes do not see what the first one writes there; give a folder that all" in log.read_text()


def test_what_only_one_process_can_do_is_refused_once(forks, flags, tmp_path):
    log = tmp_path / "log"
    codes = forks.run([*flags, "--start", "wanda", "--output_dir", tmp_path / "run"], 2, output=log)
    assert codes == [2, 2]
    assert "--start wanda is not computed on 2 processes: run proxsparse prune --method wanda" in log.read_text()
    codes = forks.run([*flags, "--data", tmp_path / "nothing.jsonl", "--output_dir", tmp_path / "run"], 2, output=log)
    assert codes == [2, 2]
    assert log.read_text().count("nothing.jsonl") == 1  # not once a process
    assert "Traceback" not in log.read_text()


def test_shards_that_are_mapped_from_the_files_are_the_same(forks, flags, tmp_path):
    runs = [
        learned(forks, tmp_path / keep, flags, 2, "--pretrained_weights", keep, "--max_steps", "3")
        for keep in ("device", "disk")
    ]
    assert all(torch.equal(torch.from_numpy(bits), torch.from_numpy(runs[0][2])) for _, _, bits in runs)
    assert len({run[0]["masks_sha256"] for run in runs}) == 1
