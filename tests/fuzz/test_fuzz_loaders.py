"""A part of `fuzz_loaders.py`: every loader takes its valid files, and loads or refuses damaged ones."""

import pytest
from fuzz_loaders import bounded, fuzz, outcome, write
from loaders import LOADERS, Loader


@pytest.mark.parametrize("inputs", [200, pytest.param(2000, marks=pytest.mark.slow)])  # of all loaders together
@pytest.mark.parametrize("name", LOADERS)
def test_valid_files_are_loaded_and_damaged_ones_loaded_or_refused(name, inputs, tmp_path):
    for number, files in enumerate(LOADERS[name].valid()):
        assert outcome(name, write(files, tmp_path / str(number))) == "loaded"
    with bounded():
        found = fuzz(name, 1, range(max(3, LOADERS[name].share * inputs // 100_000)), tmp_path / "input")
    assert found.keys() <= {"loaded", "refused"}, found
    assert found["refused"] or inputs == 200


def test_a_crash_a_hang_and_memory_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz_loaders.SECONDS", 0.05)
    for load, found in (
        (lambda folder: [] * "x", "TypeError"),
        (lambda folder: all(iter(int, 1) or True for _ in iter(int, 1)), "Hang"),
        (lambda folder: bytearray(4 << 30), "MemoryError"),
        (lambda folder: folder.joinpath("absent").read_bytes(), "refused"),
    ):
        monkeypatch.setitem(LOADERS, "bad", Loader(1, None, load))
        with bounded():
            assert outcome("bad", tmp_path).startswith(found)
