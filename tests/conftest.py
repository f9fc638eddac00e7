"""Fixed seeds, memory in which a forgotten write shows, no plots; tiny models as folders; the choice of a backend."""

import gc
import os
import random

import numpy
import pytest
import torch
from forks import Forks
from pruned import chat_folders
from tiny_models import save_texts, save_tiny_model

from proxsparse.run import report

os.register_at_fork(after_in_child=gc.freeze)  # a fork that frees process groups of earlier tests crashes
os.environ["HF_HUB_OFFLINE"] = "1"  # else the client of the hub retries for half a minute
torch.set_num_threads(1)  # tests fork: a child has none of its parent's OpenMP threads, and waits for them forever
DRAW_PLOTS = report.draw_plots


@pytest.fixture(autouse=True)
def fixed_seeds():
    """The same random numbers whichever tests ran before."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def unwritten_memory_shows():
    """torch.empty returns NaN (True for bool, the maximum for integers), in Python and in C++ alike.

    torch does this only in its deterministic mode; `warn_only` keeps operations without a deterministic version usable.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(scope="session", autouse=True)
def no_plots():
    """A run draws nothing, which would take more than half of the time of a tiny one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_plots", lambda rows, similarity: {})
        yield


@pytest.fixture(scope="session")
def forks():
    """A process whose forks run commands."""
    with Forks() as server:
        yield server


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A folder with a tiny random Llama in bfloat16: with it a whole run takes a second."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Forty short documents as .jsonl."""
    return save_texts(tmp_path_factory.mktemp("data") / "text.jsonl")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The dense and the packed folder of a tiny pruned Llama in fp32; the latter with a chat template."""
    return chat_folders(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def plots(monkeypatch):
    """Runs and reports draw their plots."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "draw_plots", DRAW_PLOTS)


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="collect the cases that need a GPU also where there is none")


def pytest_collection_modifyitems(config, items):
    """Cases marked gpu are collected where there is a GPU; elsewhere only with --gpu. Those without their GPUs skip."""
    if not torch.cuda.is_available() and not config.getoption("gpu"):
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
        if torch.cuda.device_count() < needed:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU{'s' * (needed > 1)}"))
