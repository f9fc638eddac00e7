"""The decode loop of the benchmarks gives the tokens of `model.generate`, also past a sliding window."""

import pytest
import torch
from generate_speed import MODES
from lib.decode import Decoder
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


def test_the_output_layer_gets_rows_without_gaps():
    """Otherwise torch multiplies copies of its weight."""
    model, strides = tiny_model("llama"), []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: strides.append(inputs[0].stride()))
    Decoder(model, 2, 8, MODES["eager"]).prefill(PROMPTS)
    assert {(stride[0] // stride[1], *stride[1:]) for stride in strides} == {(1, model.config.hidden_size, 1)}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu(mode):
    check(tiny_model("mistral").cuda(), MODES[mode])


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_a_graph_on_the_second_gpu():
    check(tiny_model("llama").to("cuda:1"), MODES["graph"])
