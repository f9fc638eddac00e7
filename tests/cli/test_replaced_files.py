"""What the commands replace, and a signal at a bad moment."""

import shutil
import subprocess
import sys

import pytest

from proxsparse import report
from proxsparse.errors import InputError
from proxsparse.io.output_folder import MARKER, opened


def test_a_signal_during_garbage_collection_is_not_lost():
    code = """
import os, signal, sys, time
from proxsparse.errors import run_command
class Loud:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
def main():
    Loud()
    time.sleep(30)
sys.exit(run_command(main))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (143, "\nstopped by SIGTERM\n")


def test_a_report_replaces_only_what_a_run_may_have_written(tmp_path):
    final = tmp_path / "run"
    final.mkdir()
    (final / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "feasible_share": 0.5, "norm_gap": 0.1}\n')
    report.main([str(final)])
    (final / "report.md").write_text("mine")
    with pytest.raises(InputError, match=r"report\.md: its folder has no .*; move it away"):
        report.main([str(final)])
    assert (final / "report.md").read_text() == "mine"
    with opened(tmp_path / "marked", "train", {}):
        pass
    shutil.copy(tmp_path / "marked" / MARKER, final / MARKER)
    report.main([str(final)])
    assert (final / "report.md").read_text() != "mine"
    (final / "loss.png").unlink(missing_ok=True)
    (final / "loss.png").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"loss\.png: is a link or a folder, and the report would replace it"):
        report.main([str(final)])
