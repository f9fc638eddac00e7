"""metrics.jsonl has every finished step at any moment; the trackers of --report_to get the same rows."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from proxsparse.errors import InputError
from proxsparse.training.log import RunLog, check_tracker

ROW = {"loss": 2.5, "learning_rate": 1e-3, "feasible_share": 0.25, "mask_change": 0.125}
ROWS = [{"step": step, **ROW} for step in (1, 2)]


@pytest.fixture
def wandb(monkeypatch):
    """In the place of the package: init(...) returns a run with the functions log and finish, and an id."""
    package = Mock()
    package.init.return_value = package
    package.id = "made-up"
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def log_rows(folder, report_to):
    with RunLog(folder, 0, len(ROWS), "2:4", report_to) as log:
        for count, row in enumerate(ROWS, 1):
            log.step(row)
            written = (folder / "metrics.jsonl").read_text()
            assert [json.loads(line) for line in written.splitlines()] == ROWS[:count], "flushed with every step"
            assert written.endswith("\n")


def test_wandb_gets_the_rows_and_the_end(tmp_path, wandb):
    log_rows(tmp_path, "wandb")
    start = call.init(project="proxsparse", dir=tmp_path, name=tmp_path.name)
    assert wandb.method_calls == [start, *(call.log(row, step=row["step"]) for row in ROWS), call.finish()]


def test_a_resumed_run_continues_in_wandb_and_a_new_one_in_the_same_folder_does_not(tmp_path, wandb):
    starts = []
    for made_up, done in (("first", 0), ("other", 1), ("new", 0), ("other", 1)):
        wandb.id = made_up  # the id of a run that is not given one
        with RunLog(tmp_path, done, len(ROWS), "2:4", "wandb") as log:
            log.step(ROWS[done])
        starts.append({key: wandb.init.call_args.kwargs.get(key) for key in ("id", "resume")})
    unnamed = {"id": None, "resume": None}
    assert starts == [unnamed, {"id": "first", "resume": "allow"}, unnamed, {"id": "new", "resume": "allow"}]


def test_tensorboard_gets_every_figure_at_its_step(tmp_path, monkeypatch):
    writer = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    log_rows(tmp_path, "tensorboard")
    figures = [call().add_scalar(name, value, step) for step in (1, 2) for name, value in ROW.items()]
    assert writer.mock_calls == [call(tmp_path / "tensorboard"), *figures, call().close()]


def test_a_folder_called_like_the_tracker_is_not_a_package(tmp_path, monkeypatch):
    """wandb leaves ./wandb where it runs, and Python takes any folder for a package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(InputError, match="pip install wandb"):
        check_tracker("wandb")
    check_tracker("none")
