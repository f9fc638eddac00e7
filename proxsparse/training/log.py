"""Logging of a run: metrics.jsonl, the progress bar, and the tracker of --report_to."""

import importlib.util
import json
import os
from pathlib import Path

from proxsparse.errors import InputError
from proxsparse.io.atomic import write_file
from proxsparse.runtime.distributed import is_rank_zero
from proxsparse.runtime.progress import phase

NOTED = {  # figures of a step that the progress bar shows
    "loss": "loss {:.3f}",
    "learning_rate": "lr {:.1e}",
    "feasible_share": "N:M {:.1%}",
    "mask_change": "changed {:.2%}",
    "held_out_loss": "held-out {:.3f}",
}


class RunLog:
    """Writes one row per step to metrics.jsonl, the progress bar and the tracker, on rank zero only.

    Every row is flushed, so a killed run keeps its rows.

    Args:
        run_dir: folder of metrics.jsonl, which has the rows of the finished steps; None: nothing is written.
        done: number of finished steps.
        steps: number of all steps.
        title: title of the progress bar.
        report_to: the tracker.
    """

    def __init__(
        self,
        run_dir: Path | None,
        done: int,
        steps: int,
        title: str,
        report_to: str = "none",
    ):
        writes = run_dir is not None and is_rank_zero()
        path = run_dir / "metrics.jsonl" if writes else Path(os.devnull)
        if writes and path.exists():  # rows after the checkpoint are written again
            write_file(path, b"".join(path.read_bytes().splitlines(keepends=True)[:done]))
        self.file = path.open("a", encoding="utf-8")
        self.bar = phase(title, steps, done=done)
        self.track, self.close_tracker = TRACKERS[report_to if writes else "none"](run_dir, done)

    def step(self, row: dict) -> None:
        """Records one step; `row` holds "step" and numbers."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        self.learning.result = f"loss {row['loss']:.3f}"
        shown = [text.format(row[name]) for name, text in NOTED.items() if name in row]
        self.learning.note = " ".join(shown)
        self.learning.step()
        self.track(row)

    def __enter__(self) -> "RunLog":
        self.learning = self.bar.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self.bar.__exit__(*exception)
        self.file.close()
        self.close_tracker()


# A tracker: (run_dir, done) -> (function that records a row, function that closes the tracker).


def _no_tracker(_run_dir: Path, _done: int):
    return lambda row: None, lambda: None


def _tensorboard(run_dir: Path, _done: int):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run_dir / "tensorboard")

    def track(row: dict) -> None:
        for name, value in row.items():
            if name != "step":
                writer.add_scalar(name, value, row["step"])

    return track, writer.close


def _wandb(run_dir: Path, done: int):
    """A resumed run continues the same wandb run; wandb ignores rows of steps that it has already."""
    import wandb

    id_file = run_dir / "wandb" / "run-id"  # in wandb's own folder
    same = {"id": id_file.read_text(), "resume": "allow"} if done and id_file.is_file() else {}
    run = wandb.init(project="proxsparse", dir=run_dir, name=run_dir.name, **same)
    id_file.parent.mkdir(exist_ok=True)
    id_file.write_text(run.id)
    return lambda row: run.log(row, step=row["step"]), run.finish


TRACKERS = {"none": _no_tracker, "tensorboard": _tensorboard, "wandb": _wandb}


def check_tracker(report_to: str) -> None:
    """Raises InputError if the package of --report_to is not installed."""
    spec = importlib.util.find_spec(report_to) if report_to != "none" else None
    # without an origin it is only a folder of that name, such as the ./wandb that wandb creates
    if report_to != "none" and (spec is None or spec.origin is None):
        raise InputError(f"--report_to {report_to}: the package is not installed; run: pip install {report_to}")
