"""`proxsparse finetune` in two processes learns what one learns, and a killed run continues in one."""

import pytest
import torch
from commands import call, result_of
from safetensors.torch import load_file

from proxsparse import prune

FINETUNE = "proxsparse.finetune.main"
STEP = ["--learning_rate", "0.01", "--held_out", "4", "--save_minutes", "0.000001"]


@pytest.fixture(scope="session")
def pruned(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruned") / "run"
    call(prune.main, "--method", "wanda", *flags, "--eval_data", "none", "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_two_processes_train_what_one_trains(forks, flags, pruned, tmp_path):
    given = [pruned, *flags[2:], *STEP]

    def tuned(name, processes, steps=(), **how):
        log = tmp_path / f"{name}.log"
        accumulated = ["--gradient_accumulation_steps", 2 // processes, "--output_dir", tmp_path / name, *steps]
        codes = forks.run([*given, *accumulated], processes, output=log, main=FINETUNE, **how)
        assert codes == [0] * processes or how, log.read_text()[-2000:]
        return codes

    tuned("one", 1)
    tuned("two", 2)
    assert -9 in tuned("killed", 2, before=("proxsparse.io.checkpoints.finish", 4, "kill"))
    tuned("killed", 1, ["--resume_from_checkpoint", "last"])
    one = load_file(tmp_path / "one" / "model.safetensors")
    result = result_of(tmp_path / "one")
    for name in ("two", "killed"):
        other = load_file(tmp_path / name / "model.safetensors")
        found = result_of(tmp_path / name)
        assert found["masks_sha256"] == result["masks_sha256"]
        for key in ("dense", "pruned", "finetune"):
            assert found["perplexity"][key] == pytest.approx(result["perplexity"][key], rel=1e-3)
        for weight, value in other.items():
            assert value.dtype == one[weight].dtype
            torch.testing.assert_close(value.float(), one[weight].float(), atol=2e-3, rtol=0.01, msg=weight)
            assert torch.equal(value == 0, one[weight] == 0), weight
    assert found["resumed"]
