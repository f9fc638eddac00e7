"""Logging of a run: metrics.jsonl and the progress bar."""

import json
import math
import os
from pathlib import Path

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
    """Writes rows to metrics.jsonl and the progress bar, on rank zero only.

    Every row is flushed, so a killed run keeps its rows.

    Args:
        run_dir: folder of metrics.jsonl, which has rows of the finished steps; None: nothing is written.
        done: number of finished steps.
        steps: number of all steps.
        title: title of the progress bar.
    """

    def __init__(self, run_dir: Path | None, done: int, steps: int, title: str):
        writes = run_dir is not None and is_rank_zero()
        path = run_dir / "metrics.jsonl" if writes else Path(os.devnull)
        if writes and path.exists():  # rows after the checkpoint are written again
            lines = path.read_bytes().splitlines(keepends=True)
            write_file(path, b"".join(line for line in lines if step_of_row(line) <= done))
        self.file = path.open("a", encoding="utf-8")
        self.bar = phase(title, steps, done=done)

    def step(self, row: dict) -> None:
        """Counts one step, and records its row of "step" and numbers if it has a loss."""
        if "loss" in row:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
            self.learning.result = f"loss {row['loss']:.3f}"
            shown = [text.format(row[name]) for name, text in NOTED.items() if name in row]
            self.learning.note = " ".join(shown)
        self.learning.step()

    def __enter__(self) -> "RunLog":
        self.learning = self.bar.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self.bar.__exit__(*exception)
        self.file.close()


def step_of_row(line: bytes) -> float:
    """The step of a line of metrics.jsonl; infinite if a killed process has written only a part of it."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf
