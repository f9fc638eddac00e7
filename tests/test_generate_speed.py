"""generate_speed: its decoders give the tokens of `model.generate`, also past a sliding window; ratios."""

from functools import partial

import pytest
import torch
from generate_speed import MODES
from lib.decode import Decoder
from lib.measure import elapsed_ms
from pruned import prune_
from tiny_models import MODELS, tiny_model

from proxsparse.inference.convert import sparsify_

QUICK = ("mistral", "gemma2-mixed")
PROMPTS, NEW = torch.arange(14).view(2, 7) * 17 + 3, 12  # the sliding windows have 4 and 8 tokens


def check(model, decoder_of) -> None:
    """Twice, because a decoder starts again on the same memory."""
    prompts = PROMPTS.to(model.device)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    expected = model.generate(prompts, max_new_tokens=NEW, do_sample=False)
    decoder = decoder_of(model, 2, 7 + NEW)
    for _ in range(2):
        tokens = decoder.prefill(prompts).clone(), decoder.decode(NEW - 1)
        assert torch.equal(torch.cat([prompts, *tokens], 1), expected)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in MODELS])
def test_tokens_are_those_of_transformers(name):
    check(tiny_model(name), MODES["eager"])


def test_a_packed_model_and_a_compiled_step():
    model = sparsify_(prune_(tiny_model("llama")))
    check(model, partial(Decoder, faster=lambda step, _: torch.compile(step, backend="aot_eager", fullgraph=True)))
    check(model, MODES["generate"])


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
