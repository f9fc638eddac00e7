"""Logging of a run: metrics.jsonl and the progress bar."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def run_log(run_dir: Path | None, done: int, steps: int, title: str) -> Iterator[Callable[[dict], None]]:
    """Metrics.jsonl and the progress bar of a training, on rank zero only, from step `done` of `steps`.

    Every row is flushed, so a killed run keeps its rows.

    Args:
        run_dir: folder of metrics.jsonl, which has rows of the finished steps; None: nothing is written.
    Yields:
        `log_step(row)`, which counts one step, and records its row of "step" and numbers if it has a loss.
    """
    writes = run_dir is not None and is_rank_zero()
    path = run_dir / "metrics.jsonl" if writes else Path(os.devnull)
    if writes and path.exists():  # rows after the checkpoint are written again
        lines = path.read_bytes().splitlines(keepends=True)
        write_file(path, b"".join(line for line in lines if step_of_row(line) <= done))
    with path.open("a", encoding="utf-8") as file, phase(title, steps, done=done) as learning:

        def log_step(row: dict) -> None:
            if "loss" in row:
                file.write(json.dumps(row) + "\n")
                file.flush()
                learning.result = f"loss {row['loss']:.3f}"
                learning.note = " ".join(text.format(row[name]) for name, text in NOTED.items() if name in row)
            learning.step()

        yield log_step


def step_of_row(line: bytes) -> float:
    """The step of a line of metrics.jsonl; infinite if a killed process has written only a part of it."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf
