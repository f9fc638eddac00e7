"""metrics.jsonl has every finished step at any moment; a resumed run writes the rows after its checkpoint again."""

import json

from proxsparse.training.log import RunLog

ROW = {"loss": 2.5, "learning_rate": 1e-3, "feasible_share": 0.25, "mask_change": 0.125}
ROWS = [{"step": step, **ROW} for step in (1, 3)]


def test_every_row_is_flushed_and_a_resumed_run_replaces_later_rows(tmp_path):
    for done in (0, 1):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": ' * done)  # of a killed process
        with RunLog(tmp_path, done, 5, "2:4") as log:
            for count, row in enumerate(ROWS[done:], done + 1):
                log.step({"grad_norm": 1.0})  # a step that is not logged
                log.step(row)
                written = (tmp_path / "metrics.jsonl").read_text()
                assert [json.loads(line) for line in written.splitlines()] == ROWS[:count], "flushed with every step"
                assert written.endswith("\n")
