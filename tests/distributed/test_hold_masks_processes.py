"""hold_masks_ with two processes: FSDP2 and DDP give the results of one process, and resume bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pruned import pruned_model

JOBS = {  # name -> the function of trainer_processes, and the number of processes
    "alone": ("fine_tune", 1),
    "ddp": ("fine_tune", 2),
    "fsdp2": ("fine_tune_on_fsdp2", 2),
    **{f"ragged-{count}": ("hold_ragged_masks", count) for count in (1, 2, 4)},
}

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def results(forks, tmp_path_factory) -> Path:
    """The folder that trainer_processes has filled."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("processes")
    pruned_model().save_pretrained(folder / "model")
    for name, (job, count) in JOBS.items():
        log = folder / f"{name}.log"
        codes = forks.run([job, folder, name], count, output=log, main="trainer_processes.main")
        assert codes == [0] * count, log.read_text()
    return folder


@pytest.mark.parametrize("name", ["alone", "ddp", "fsdp2"])
def test_fine_tuning_keeps_the_zeros_and_resumes_bit_for_bit(results, name):
    before = dict(pruned_model().named_parameters())
    expected = torch.load(results / "alone-0.pt")[0]
    for file in results.glob(f"{name}-*.pt"):
        straight, resumed = torch.load(file)
        for parameter, weight in straight.items():
            assert torch.equal(weight, resumed[parameter])
            torch.testing.assert_close(weight, expected[parameter], rtol=0, atol=1e-5)
            assert not torch.equal(weight, before[parameter])
            zeros = weight[before[parameter] == 0]
            assert parameter == "model.embed_tokens.weight" or (zeros == 0).all()
            assert not zeros.signbit().any()


@pytest.mark.parametrize("count", [2, 4])
def test_uneven_and_empty_shards_are_held_as_the_whole(results, count):
    """The largest number of nonzeros is taken over all processes: zeros that may be trained are the same everywhere."""
    expected = torch.load(results / "ragged-1-0.pt")
    assert all((weight == 0).float().mean() == 0.5 for weight in expected["weights"] if weight.ndim == 2)
    assert all(torch.equal(m == 0, w == 0) for m, w in zip(expected["moments"], expected["weights"], strict=True))
    for rank in range(count):
        torch.testing.assert_close(torch.load(results / f"ragged-{count}-{rank}.pt"), expected, rtol=1e-12, atol=1e-12)
