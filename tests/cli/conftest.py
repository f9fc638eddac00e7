"""A tiny model and a text file: with them a whole run takes a second."""

import os
import signal
import sys

import pytest
from tiny_models import save_texts, save_tiny_model

from proxsparse import prune
from proxsparse.errors import run_command


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A folder with a tiny random Llama in bfloat16."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Forty short documents as .jsonl."""
    return save_texts(tmp_path_factory.mktemp("data") / "text.jsonl")


@pytest.fixture
def command_in_child(tmp_path):
    """command_in_child(main, arguments, sabotage) -> (exit code, or minus the signal that killed it; its stderr).

    The command in a forked process, which `sabotage()` has prepared before: what is killed is a real process.
    """

    def run(main, arguments, sabotage=lambda: None):
        if (child := os.fork()) == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
                with (tmp_path / "stderr").open("w", buffering=1) as stderr:
                    sys.stderr = stderr
                    sabotage()
                    code = run_command(lambda: main(arguments))
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, (tmp_path / "stderr").read_text()

    return run


@pytest.fixture(scope="session")
def pruned_dir(tmp_path_factory, tiny_llama):
    """What prune writes."""
    folder = tmp_path_factory.mktemp("runs") / "llama"
    flags = ["--method", "magnitude", "--model", str(tiny_llama), "--output_dir", str(folder), "--eval_data", "none"]
    assert prune.main(flags) == 0
    return folder
