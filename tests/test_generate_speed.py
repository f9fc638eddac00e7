"""generate_speed: its decode loop gives the tokens of `model.generate`, also past a sliding window; ratios."""

import generate_speed
import pytest
import torch
from generate_speed import MODES
from lib import common
from lib.decode import Decoder
from lib.measure import elapsed_ms
from pruned import prune_
from tiny_models import MODELS, tiny_model

from proxsparse.inference.convert import sparsify_

PROMPTS, NEW = torch.arange(14).view(2, 7) * 17 + 3, 12  # the sliding windows have 4 and 8 tokens


def check(model, faster) -> None:
    """Twice, because a decoder starts again on the same memory."""
    prompts = PROMPTS.to(model.device)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    expected = model.generate(prompts, max_new_tokens=NEW, do_sample=False)
    decoder = Decoder(model, 2, 7 + NEW, faster)
    for _ in range(2):
        tokens = [decoder.prefill(prompts).clone(), *(decoder.step().clone() for _ in range(NEW - 1))]
        assert torch.equal(torch.cat([prompts, *tokens], 1), expected)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name):
    check(tiny_model(name), MODES["eager"])


def test_a_packed_model_and_a_compiled_step():
    model = sparsify_(prune_(tiny_model("llama")))
    check(model, lambda step, device: torch.compile(step, backend="aot_eager", fullgraph=True))


def test_onednn_is_off_for_steps_of_one_token_only():
    """And it is restored after an error: a case that fails must not change how the next ones are measured."""
    model, seen = tiny_model("llama"), []
    model.register_forward_pre_hook(lambda *_: seen.append(torch._C._get_mkldnn_enabled()))
    decoders = [Decoder(model, batch, 12, MODES["eager"]) for batch in (1, 2)]
    seen.clear()
    for batch, decoder in enumerate(decoders, 1):
        decoder.prefill(PROMPTS[:batch])
        decoder.step()
    assert seen == [True, False, True, True]
    decoders[0].run = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        decoders[0].step()
    assert torch._C._get_mkldnn_enabled()


def broken(*arguments):
    raise RuntimeError("no such\nkernel")


def test_rows_of_every_form_and_a_mode_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    monkeypatch.setitem(MODES, "compile", broken)
    flags = ["--devices", "cpu", "--models", "tiny", "--prompt", "4", "--new_tokens", "3", "--batches", "1"]
    generate_speed.main([*flags, "--dtypes", "float32", "--layers", "2", "--modes", "eager", "compile"])
    rows = common.read_rows(tmp_path / "generate_speed.jsonl")
    notes = [row["note"] for row in rows if row["mode"] == "compile"]
    assert notes == ["RuntimeError: no such kernel"] * len(generate_speed.FORMS)
    found = {row["form"]: row for row in rows if row["mode"] == "eager"}
    weights, biases = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64), 2 * (64 + 2 * 32) * 4
    assert found["dense"]["layer_bytes"] == 4 * weights + biases
    assert found["sparse"]["layer_bytes"] == 4 * weights // 2 + weights // 8 + biases
    assert found["sparse"]["same_tokens"] == 1
    for row in found.values():
        assert row["decode_tokens_per_s"] == pytest.approx(1000 / row["p50_ms"])
        assert (row["decode_backends"] == ["dense"]) == (row["form"] == "dense")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu(mode):
    check(tiny_model("mistral").cuda(), MODES[mode])


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_graphs_and_times_on_two_gpus():
    for device in ("cuda:0", "cuda:1"):
        check(tiny_model("llama").to(device), MODES["graph"])
    x = torch.randn(2048, 2048, device="cuda:1")
    times = [elapsed_ms(lambda n=n: [x @ x for _ in range(n)], x.device, n) for n in (1, 1, 50)]
    assert times[2] > 10 * times[1]
