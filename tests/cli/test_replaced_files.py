"""What the commands replace, and a signal at a bad moment."""

import json
import subprocess
import sys

import pytest

from proxsparse import report
from proxsparse.errors import InputError
from proxsparse.io.output_folder import FORMAT, MARKER


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
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "report.md").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InputError, match=r"no \.proxsparse\.json in this folder, so no run wrote it"):
        report.main([str(tmp_path)])
    marker = {"format": FORMAT, "run_id": "", "command": "train", "settings": {}}
    (tmp_path / MARKER).write_text(json.dumps(marker))
    report.main([str(tmp_path)])
    assert "Report of a run" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "mine").read_text() == "mine"
