"""benchmarks/studies.py on a tiny model: shared runs, and constraints that are hard."""

import pytest
import studies
import torch
from lib import common, runs

from proxsparse.errors import InputError
from proxsparse.optim import ProxAdamW


@pytest.fixture
def command(tiny_llama, text_file, tmp_path, monkeypatch):
    """command(name, *flags) -> the rows of the study, and how often the job was run so far."""
    monkeypatch.setattr(common, "commit", lambda: "0123456789ab")
    started, results = [], tmp_path / "rows.jsonl"
    prune = runs.job.prune
    monkeypatch.setattr(runs.job, "prune", lambda args: started.append(args) or prune(args))
    shared = f"--model {tiny_llama} --data {text_file} --eval_data {text_file} --device cpu --num_samples 8 "
    shared += "--seq_len 64 --eval_seq_len 64 --eval_max_windows 2 --objective paper"

    def call(name, *flags):
        studies.main([name, "--output_dir", str(tmp_path / "out"), "--results", str(results), *shared.split(), *flags])
        return {row["cell"]: row for row in common.read_rows(results) if row["study"] == name}, len(started)

    return call


def test_studies_share_runs_and_the_swept_constants_reach_the_learning(command):
    found, count = command("lambda1", "--values", "0.1", "1", "10")
    shares = [found[factor]["feasible_share"] for factor in ("0.1", "1", "10")]
    assert shares == sorted(set(shares))
    assert count == 3
    found, count = command("early_mask", "--values", "1", "10")
    assert found["1"]["curve"][-1] == [8, 1]
    assert count == 3  # those of lambda1
    found, count = command("constraints")
    assert count == 6  # both soft is a run of lambda1
    assert [found[cell]["feasible_share"] for cell in ("hard sparsity", "both hard")] == [1, 1]
    found, count = command("norm_gap", "--values", "0", "20", "inf")
    assert count == 7  # 0 and inf are runs of constraints
    assert found["0"]["norm_gap"] > found["20"]["norm_gap"] > found["inf"]["norm_gap"]


def test_hard_frozen_weights_keep_pretrained_values():
    weight = torch.nn.Parameter(torch.randn(8, 16))
    pretrained = weight.detach().clone()
    optimizer = ProxAdamW([weight], lr=0.05, reg_lambda=0.01)
    with studies.hard_frozen_weights():
        for _ in range(5):
            weight.grad = torch.randn(8, 16)
            optimizer.step()
            assert ((weight == pretrained).view(8, 4, 4).sum(-1) >= 2).all()
    assert not torch.equal(weight, pretrained)
    weight.grad = torch.randn(8, 16)
    optimizer.step()  # the constraint has ended with its context
    assert not (weight == pretrained).any()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["lambda1", "--values", "often"], "--values often: lambda1 takes values such as"),
        (["lambda2", "--eval_data", "none"], "lambda2: measures the perplexity"),
        # of a later cell: refused before the first run
        (
            ["lambda1", "--objective", "masked", "--reg_lambda", "0.002", "--values", "1", "inf"],
            "--reg_lambda 1000000000",
        ),
    ],
)
def test_refusals(command, flags, message):
    with pytest.raises(InputError, match=message):
        command(*flags)
