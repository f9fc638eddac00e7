"""metrics.jsonl has every finished step at any moment; the trackers of --report_to get the same rows."""

import json
import sys
from types import SimpleNamespace

import pytest

from proxsparse.errors import InputError
from proxsparse.training.log import RunLog, check_tracker

ROW = {"loss": 2.5, "learning_rate": 1e-3, "feasible_share": 0.25, "mask_change": 0.125}
ROWS = [{"step": step, **ROW} for step in (1, 2)]


class Wandb:
    """The part of wandb that is used."""

    def __init__(self):
        self.calls, self.id = [], "made-up"

    def init(self, **settings):
        self.calls.append(("init", settings))
        self.id = settings.get("id", self.id)
        return self

    def log(self, row, step):
        self.calls.append(("log", row, step))

    def finish(self):
        self.calls.append(("finish",))


class Writer:
    """The part of torch.utils.tensorboard.SummaryWriter that is used."""

    def __init__(self, folder):
        self.folder, self.scalars, self.closed = folder, [], False
        Writer.last = self

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        self.closed = True


def log_rows(folder, report_to="none"):
    with RunLog(folder, 0, len(ROWS), "2:4", report_to) as log:
        for count, row in enumerate(ROWS, 1):
            log.step(row)
            written = (folder / "metrics.jsonl").read_text()
            assert [json.loads(line) for line in written.splitlines()] == ROWS[:count], "flushed with every step"
            assert written.endswith("\n")


@pytest.mark.parametrize("works_in", [".", ".next"])  # the latter where it will replace a result
def test_wandb_gets_the_rows_and_the_end(works_in, tmp_path, monkeypatch):
    wandb, run_dir = Wandb(), tmp_path / works_in
    run_dir.mkdir(exist_ok=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log_rows(run_dir, "wandb")
    start = ("init", {"project": "proxsparse", "dir": run_dir, "name": tmp_path.name})
    assert wandb.calls == [start, *(("log", row, row["step"]) for row in ROWS), ("finish",)]


def test_a_resumed_run_continues_in_wandb_and_a_new_one_in_the_same_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    starts = []
    for before, done in (("first", 0), ("other", 1), ("new", 0), ("other", 1)):
        wandb = sys.modules["wandb"]
        wandb.calls, wandb.id = [], before  # what wandb makes up unless it is told
        with RunLog(tmp_path, done, len(ROWS), "2:4", "wandb") as log:
            log.step(ROWS[done])
        starts.append({key: wandb.calls[0][1].get(key) for key in ("id", "resume")})
    unnamed = {"id": None, "resume": None}
    assert starts == [unnamed, {"id": "first", "resume": "allow"}, unnamed, {"id": "new", "resume": "allow"}]


def test_tensorboard_gets_every_figure_at_its_step(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    log_rows(tmp_path, "tensorboard")
    assert Writer.last.folder == tmp_path / "tensorboard"
    assert Writer.last.scalars == [(name, value, step) for step in (1, 2) for name, value in ROW.items()]
    assert Writer.last.closed


def test_a_folder_called_like_the_tracker_is_not_a_package(tmp_path, monkeypatch):
    """wandb leaves ./wandb where it runs, and Python takes any folder for a package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(InputError, match="pip install wandb"):
        check_tracker("wandb")
    check_tracker("none")
