"""Checkpoints that a thread writes, as for a model on a GPU, and the digest; others are in cli/test_resume.py."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from proxsparse.data.calibration import TokenBatches, arrays_of
from proxsparse.io import checkpoints as module
from proxsparse.io.checkpoints import Checkpoints, digest_of
from proxsparse.training import state


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, {"model": "m"})


@pytest.fixture
def gate(monkeypatch):
    """The thread waits here before it finishes a checkpoint."""
    event, finish = threading.Event(), module.finish

    def waiting(*arguments):
        assert event.wait(60)
        finish(*arguments)

    monkeypatch.setattr(module, "finish", waiting)
    return event


def test_later_changes_do_not_reach_it(checkpoints, gate):
    weight, facts, called = torch.arange(6.0), {"steps": [1]}, []
    checkpoints.save("step-1", {"w": weight}, facts, lambda: called.append(checkpoints.steps()), in_thread=True)
    weight.zero_()
    facts["steps"].append(2)
    assert checkpoints.steps() == called == []
    gate.set()
    checkpoints.wait()
    assert called == [["step-1"]]
    assert checkpoints.facts("step-1")["steps"] == [1]
    assert torch.equal(checkpoints.load("step-1", {"w": torch.empty(6)})["w"], torch.arange(6.0))
    checkpoints.wait()  # there is nothing more to wait for


def test_the_next_one_waits_and_raises_its_error(checkpoints, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "finish", full)
        checkpoints.save("step-1", {"w": torch.ones(3)}, {}, in_thread=True)
        for call in (checkpoints.wait, lambda: checkpoints.save("step-2", {"w": torch.ones(3)}, {})):
            with pytest.raises(OSError, match=r"step-1 could not be written.*the disk is full"):
                call()
            checkpoints.save("step-1", {"w": torch.ones(3)}, {}, in_thread=True)
        with pytest.raises(OSError, match="step-1 could not be written"):
            checkpoints.wait()
    assert not list(checkpoints.folder.iterdir())
    checkpoints.save("step-2", {"w": torch.ones(3)}, {})
    assert checkpoints.steps() == ["step-2"]


@pytest.mark.parametrize(("free", "fits"), [({"host": 1500}, True), ({"host": 1499}, False), ({}, False)])
def test_without_room_for_a_copy_there_is_no_thread(free, fits, monkeypatch):
    monkeypatch.setattr(state, "free_memory", lambda device: free)
    assert state.copy_fits({"w": torch.zeros(125), "m": torch.zeros(125)}) == fits


def test_the_digest_depends_on_the_model_and_on_all_of_the_samples():
    stored = TokenBatches(np.arange(12, dtype=np.uint32), np.array([0, 3, 8, 12]), np.array([2, 0, 1]), 1, None, 0)
    changed = {
        "ids": np.append(np.arange(11, dtype=np.uint32), 5),
        "bounds": np.array([0, 4, 8, 12]),
        "order": np.array([0, 2, 1]),
        "batch_size": 2,
        "bos": 1,
    }
    given = [{"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}]
    labels = [[given[0] | {"labels": torch.tensor([[5, 6, label]])}] for label in (7, 8)]
    two_rows = [{name: tensor.view(3, 1) for name, tensor in given[0].items()}]
    samples = [two_rows, stored, *(replace(stored, **{name: value}) for name, value in changed.items()), given, *labels]
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    digests = [digest_of(model, arrays_of(batches)) for model in models for batches in samples]
    assert len({*digests}) == 2 * len(samples)
    assert digest_of(models[0], arrays_of(replace(stored))) == digests[1]
