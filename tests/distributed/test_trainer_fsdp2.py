"""Trainer, and hold_masks_ also on uneven and empty shards: gloo processes give the results of one.

Accelerate shards only on accelerators: on a CPU `TrainingArguments(fsdp=True)` runs DDP. `train_under_accelerate`
tells its state that this is FSDP2, and everything after that is accelerate's own code; `train_as_loaded` needs no help.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pruned import pruned_model
from tiny_models import tiny_model
from transformers import PreTrainedModel

from proxsparse.io.mask_files import load_masks

RUNS = ["train_under_accelerate", "resume_under_accelerate", "train_as_loaded"]
UNSUPPORTED = (
    {} if hasattr(PreTrainedModel, "fsdp_size") else {"train_as_loaded": "needs the Trainer of transformers 5.18"}
)
TUNED = {"tuned": ("fine_tune", 1), "ddp": ("fine_tune", 2), "fsdp2": ("fine_tune_on_fsdp2", 2)}
JOBS = TUNED | {  # name -> the function of trainer_processes, and the number of processes
    "alone": ("train_with_trainer", 1),
    **{run: (run, 2) for run in RUNS if run not in UNSUPPORTED},
    **{f"held-{count}": ("hold_ragged_masks", count) for count in (1, 2, 4)},
}
each_run = pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=pytest.mark.skipif(run in UNSUPPORTED, reason=UNSUPPORTED.get(run, ""))) for run in RUNS],
)

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def results(forks, tmp_path_factory) -> Path:
    """The folder that trainer_processes has filled."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("processes")
    tiny_model("llama").save_pretrained(folder / "model")
    pruned_model().save_pretrained(folder / "pruned")
    for name, (job, count) in JOBS.items():
        log = folder / f"{name}.log"
        codes = forks.run([job, folder, name], count, output=log, main="trainer_processes.main")
        assert codes == [0] * count, log.read_text()
    return folder


@each_run
def test_two_processes_prune_and_log_as_one_and_hold_shards(results, run):
    alone, masks = load_masks(results / "alone" / "masks.safetensors"), load_masks(results / run / "masks.safetensors")
    assert masks.keys() == alone.keys()
    equal = sum((mask == alone[name]).sum().item() for name, mask in masks.items())
    assert equal >= 0.999 * sum(mask.numel() for mask in masks.values())

    (expected,), both = ([torch.load(p) for p in (results / name).glob("seen-*.pt")] for name in ("alone", run))
    assert len(both) == 2
    for seen in both:
        assert seen["evaluated"] == pytest.approx(expected["evaluated"], abs=1e-5), "a stale copy"
        for row, expected_row in zip(seen["logs"], expected["logs"], strict=True):
            assert row["loss"] == pytest.approx(expected_row["loss"], abs=1e-5)
            assert row["feasible_share"] == pytest.approx(expected_row["feasible_share"], abs=1e-3)
        assert seen["sharded"]
        assert seen["of the model"], "accelerate exchanges the parameters in param_groups for the model's"
        assert seen["with a state"]


@pytest.mark.parametrize("name", TUNED)
def test_fine_tuning_keeps_the_zeros_and_resumes_bit_for_bit(results, name):
    before = dict(pruned_model().named_parameters())
    expected = torch.load(results / "tuned-0.pt")[0]
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
    expected = torch.load(results / "held-1-0.pt")
    assert all((weight == 0).float().mean() == 0.5 for weight in expected["weights"] if weight.ndim == 2)
    assert all(torch.equal(m == 0, w == 0) for m, w in zip(expected["moments"], expected["weights"], strict=True))
    for rank in range(count):
        torch.testing.assert_close(torch.load(results / f"held-{count}-{rank}.pt"), expected, rtol=1e-12, atol=1e-12)
