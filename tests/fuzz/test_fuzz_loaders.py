"""A slice of `fuzz_loaders.py`: every loader takes its valid files, and a few hundred damaged ones do no harm."""

import pytest
from fuzz_loaders import bounded, fuzz, outcome, write
from loaders import LOADERS

OF_A_HUNDRED_THOUSAND = 2000  # inputs in all
each_loader = pytest.mark.parametrize("name", LOADERS)


@each_loader
def test_valid_files_are_loaded(name, tmp_path):
    for number, files in enumerate(LOADERS[name].valid()):
        write(files, tmp_path / str(number))
        assert outcome(name, tmp_path / str(number)) == "loaded"


@each_loader
def test_damaged_files_are_loaded_or_refused(name, tmp_path):
    count = max(3, LOADERS[name].share * OF_A_HUNDRED_THOUSAND // 100_000)
    LOADERS[name].valid()
    with bounded():
        found = fuzz(name, 1, range(count), tmp_path / "input")
    assert found.keys() <= {"loaded", "refused"}, found
    assert found["refused"]


def test_the_fuzzer_finds_a_crash_a_hang_and_memory(tmp_path, monkeypatch):
    """Guards the guard: what is no ValueError or OSError is found."""

    def loader(load):
        monkeypatch.setitem(LOADERS, "bad", LOADERS["settings"].__class__(1, None, None, load))
        with bounded():
            return outcome("bad", tmp_path)

    monkeypatch.setattr("fuzz_loaders.SECONDS", 0.05)
    assert loader(lambda folder: [] * "x").startswith("TypeError")
    assert loader(lambda folder: all(iter(int, 1) or True for _ in iter(int, 1))).startswith("Hang")
    assert loader(lambda folder: bytearray(4 << 30)).startswith("MemoryError")
    assert loader(lambda folder: folder.joinpath("absent").read_bytes()) == "refused"
