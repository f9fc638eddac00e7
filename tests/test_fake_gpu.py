"""The fake GPU: what it refuses, and when it waits; a training run and a packed model on it."""

import pytest
import torch
from fake_gpu import fake_gpu, waits_of_step
from pruned import pruned_model

from proxsparse import sparsify_, train
from proxsparse.io.mask_files import load_masks, masks_sha256
from proxsparse.training.mask_monitor import MaskMonitor


def test_mixed_devices_raise():
    with fake_gpu():
        x, cpu = torch.ones(2, device="cuda"), torch.ones(2)
        for mixed in (lambda: x + cpu, lambda: cpu.mul_(x), lambda: torch.cat([x, cpu]), lambda: cpu[x.long()]):
            with pytest.raises(RuntimeError, match="on the same device"):
                mixed()
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            x.numpy()
        assert (x * torch.tensor(2.0))[torch.tensor([0])].is_cuda  # a number and an index may be on the CPU
    assert torch.zeros(2).device.type == "cpu"


def test_waits_are_counted():
    with fake_gpu() as gpu:
        x = torch.tensor([[3.0, -4.0]]).to("cuda")  # waits
        assert (x.view(2, 1).T @ torch.ones_like(x).T).relu_().sum().item() == 0  # waits
        x[x > 0].to("cpu", non_blocking=True)  # waits for the number of elements
    names = ("copy to cuda", "_local_scalar_dense", "index")
    assert gpu.waits == {f"{name}: test_fake_gpu test_waits_are_counted": 1 for name in names}


def test_a_training_run(tiny_llama, text_file, tmp_path, monkeypatch):
    """The masks are the CPU's. A step waits once in transformers for each forward pass; a step that is logged also for
    the loss, the norm and the monitor."""
    flags = f"--model {tiny_llama} --data {text_file} --eval_data none --num_samples 4 --seq_len 32"
    flags, masks = [*flags.split(), "--precision", "mixed"], []
    for device in ("cpu", "cuda"):
        with fake_gpu():
            train.main([*flags, "--max_steps", "2", "--device", device, "--output_dir", f"{tmp_path}/{device}"])
        masks.append(masks_sha256(load_masks(tmp_path / device / "masks.safetensors")))
    assert masks[0] == masks[1]
    with_teacher = [*flags, "--match_hidden", "16", "--distill", "0.5"]
    assert (waits_of_step(flags).total(), waits_of_step(with_teacher).total()) == (4, 5)
    monkeypatch.setattr(MaskMonitor, "measures", lambda *_: False)
    for given, forward_passes in ((flags, 1), (with_teacher, 2)):
        waits = waits_of_step(given, log_points=1)
        assert {place.rsplit(" ", 1)[1] for place in waits} == {"_ignore_causal_mask_sdpa"}, waits
        assert waits.total() == forward_passes


def test_a_packed_model():
    model, tokens = sparsify_(pruned_model(dtype=torch.bfloat16)), torch.tensor([[5, 6, 7]])
    expected = model(tokens).logits
    with fake_gpu():
        torch.testing.assert_close(model.to("cuda")(tokens.to("cuda")).logits.cpu(), expected)
