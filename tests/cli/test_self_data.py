"""--data self: train and prune calibrate on text of the model itself, which stays in the output folder."""

import json

import pytest
from commands import check_pruned, refused, run

from proxsparse import pack, prune, train
from proxsparse.io.output_folder import is_written_by_runs

SMALL = ["--data", "self", "--num_samples", "8", "--seq_len", "24", "--eval_data", "none"]


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "self_text.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["proxsparse", "wanda", "sparsegpt", "maskllm"])
def test_a_whole_run(method, tiny_llama, text_file, tmp_path):
    flags = ["--data", "self", "--text_field", "ignored", "--eval_data", "none", "--method", method]
    flags += ["--gradient_accumulation_steps", "2"] * (method == "proxsparse")
    result = run(prune.main, tiny_llama, text_file, tmp_path / "run", *flags)
    check_pruned(tiny_llama, tmp_path / "run", updated=result["updated"])
    assert (result["data"], result["samples"], len(rows_of(tmp_path / "run"))) == ("self", 8, 8)
    assert is_written_by_runs("self_text.jsonl")


def test_its_file_is_data_of_another_run_and_not_packed(tiny_llama, text_file, tmp_path):
    run(train.main, tiny_llama, text_file, tmp_path / "a", *SMALL, "--packing", "--max_steps", "2")
    assert {len(row["tokens"]) for row in rows_of(tmp_path / "a")} == {24}
    run(prune.main, tiny_llama, tmp_path / "a/self_text.jsonl", tmp_path / "b", "--method", "wanda")
    assert pack.main([str(tmp_path / "a"), "--output_dir", str(tmp_path / "packed")]) == 0
    assert not (tmp_path / "packed/self_text.jsonl").exists()


def test_nothing_is_sampled_without_need(tiny_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("proxsparse.run.job.sample_documents", lambda *_, **__: pytest.fail("sampled"))
    run(prune.main, tiny_llama, text_file, tmp_path / "run", *SMALL, "--method", "magnitude")
    assert train.main(["--model", str(tiny_llama), *SMALL, "--plan", "--gradient_accumulation_steps", "2"]) == 0


def test_it_is_not_held_out_text(tiny_llama, tmp_path, capsys):
    flags = ["--method", "wanda", "--model", tiny_llama, "--output_dir", tmp_path / "run"]
    refused(capsys, prune.main, [*flags, "--eval_data", "self"], "self: ", "only for calibration; choose another")
    assert not (tmp_path / "run").exists()
