"""The loop of prefill and decode: the tokens of `model.generate`, for dense and sparse models, eager and faster."""

import pytest
import torch
from pruned import prune_
from tiny_models import MODELS, tiny_model

from proxsparse.inference.convert import sparsify_
from proxsparse.inference.generate import GreedyDecoder, generate


def expected(model, input_ids, max_new_tokens):
    """What transformers' own greedy generation gives, never stopped by an end-of-text token."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False)


def prompts(batch=2, length=7):
    return torch.randint(3, 260, (batch, length))


def decode(decoder, input_ids, new_tokens):
    tokens = [decoder.prefill(input_ids).clone(), *(decoder.step().clone() for _ in range(new_tokens - 1))]
    return torch.cat([input_ids, *tokens], 1)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_generates_as_transformers_does(name):
    model, input_ids = tiny_model(name), prompts()
    found = generate(model, input_ids, 12)  # beyond the sliding windows of 4 and 8
    assert torch.equal(found, expected(model, input_ids, 12))
    assert torch.equal(found[:, :7], input_ids)
    one = prompts(1, 1)
    assert torch.equal(generate(model, one, 1), expected(model, one, 1))


def test_a_sparse_model_generates_as_its_dense_form_does_also_compiled_as_a_whole():
    model, input_ids = prune_(tiny_model("llama")), prompts()
    dense = generate(model, input_ids, 8)
    assert torch.equal(generate(sparsify_(model), input_ids, 8), dense)
    decoder = GreedyDecoder(model, 2, 15, lambda step: torch.compile(step, backend="aot_eager", fullgraph=True))
    assert torch.equal(decode(decoder, input_ids, 8), dense)


def test_the_output_layer_gets_rows_without_gaps():
    """Otherwise torch multiplies copies of its weight, even if `is_contiguous` is true for a batch of one prompt."""
    model, strides = tiny_model("llama"), []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: strides.append(inputs[0].stride()))
    for batch in (1, 2):
        generate(model, prompts(batch), 2)
    assert {(stride[0] // stride[1], *stride[1:]) for stride in strides} == {(1, model.config.hidden_size, 1)}


def test_a_decoder_starts_again_and_keeps_its_memory():
    model, first, second = tiny_model("mistral"), prompts(), prompts()
    decoder = GreedyDecoder(model, 2, 16)
    for input_ids in (first, second, first):
        assert torch.equal(decode(decoder, input_ids, 10), expected(model, input_ids, 10))
    with pytest.raises(ValueError, match="cache of length=16 tokens is full"):
        decoder.step()


def test_a_block_on_another_device_than_the_model_counts_its_own_tokens(monkeypatch):
    """It gets a copy of the count; here the second block does, on the same device."""
    model, input_ids = tiny_model("llama"), prompts()
    decoder = GreedyDecoder(model, 2, 16)
    first, second = decoder.cache.layers
    initialise = second.lazy_initialization

    def elsewhere(key_states, value_states):
        initialise(key_states, value_states)
        second.cumulative_length, second.is_counted_for = decoder.position.clone(), False

    monkeypatch.setattr(second, "lazy_initialization", elsewhere)
    for _ in range(2):
        assert torch.equal(decode(decoder, input_ids, 6), expected(model, input_ids, 6))
    assert first.is_counted_for
    assert second.cumulative_length == decoder.position == 7 + 5


def test_a_faster_step_is_warmed_up_on_memory_that_the_prefill_clears():
    """What `capture_graph` does, without a GPU: the step runs a few times before the first prompt."""
    model, input_ids, runs = tiny_model("llama"), prompts(), []

    def faster(step):
        for _ in range(4):
            step()
        return lambda: (runs.append("run"), step())

    assert torch.equal(decode(GreedyDecoder(model, 2, 10, faster), input_ids, 4), expected(model, input_ids, 4))
    assert len(runs) == 4  # one of them to compile


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-mixed"])
def test_a_cuda_graph_generates_as_transformers_does(name):
    model, input_ids = tiny_model(name).cuda(), prompts().cuda()
    assert torch.equal(generate(model, input_ids, 12), expected(model, input_ids, 12))
    assert torch.equal(generate(model, input_ids, 12, cuda_graph=False), expected(model, input_ids, 12))


def test_bad_input():
    model, input_ids = tiny_model("llama"), prompts()
    with pytest.raises(ValueError, match=r"cuda_graph=True: the tokens are on cpu"):
        generate(model, input_ids, 4, cuda_graph=True)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        generate(model, input_ids, 0)
    for wrong in (input_ids[0], input_ids[:, :0], input_ids[:0], input_ids[None]):
        with pytest.raises(ValueError, match=r"input_ids of shape \[.*\] must be \[batch, prompt\]"):
            generate(model, wrong, 4)
    decoder = GreedyDecoder(model, 2, 8)
    first = decoder.prefill(input_ids).clone()
    for shape in ((1, 7), (3, 7), (2, 9)):
        with pytest.raises(ValueError, match=rf"{shape[1]}\]: the decoder was created for batch=2 and length=8 tokens"):
            decoder.prefill(prompts(*shape))
    assert torch.equal(torch.cat([input_ids, first, decoder.step()], 1), expected(model, input_ids, 2))


def test_only_steps_of_one_token_run_without_onednn():
    """Its product of one bfloat16 row is slower, that of several rows faster, than torch's own."""
    model, seen = tiny_model("llama"), []
    model.register_forward_pre_hook(lambda *_: seen.append(torch._C._get_mkldnn_enabled()))
    for batch in (1, 2):
        generate(model, prompts(batch), 2)
    assert seen == [True, False, True, True]
    assert torch._C._get_mkldnn_enabled()
