"""The benchmark of servers with a tiny model: its rows, and what it refuses."""

import pytest
import serve_speed
from lib import common

from proxsparse.errors import InputError

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.mark.slow
def test_a_row_for_each_form_and_batch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    flags = ["--batches", "1", "3", "--prompts", "8", "--new_tokens", "2", "--repetitions", "2", "--device", "cpu"]
    serve_speed.main(["--model", "tiny", "--layers", "1", *flags])
    rows = common.read_rows(tmp_path / "serve_speed.jsonl")
    assert [(row["batch"], row["form"]) for row in rows] == [(1, "dense"), (1, "packed"), (3, "dense"), (3, "packed")]
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert 0 < row["first_token_s"] <= row["batch"] * 2 / row["tokens_per_s"]
        assert row["form"] == "packed" or row["speed_times_dense"] == row["first_token_times_dense"] == 1
    assert "first token ms" in capsys.readouterr().out


def test_refusals(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json there"):
        serve_speed.main(["--model", str(tmp_path)])
    with pytest.raises(InputError, match="give --vllm_python"):
        serve_speed.main(["--model", "tiny", "--program", "vllm"])
