"""The layer-by-layer walk sees what the model itself computes."""

import weakref

import pytest
import torch
from layer_cases import hooked_inputs
from tiny_models import MIXED, MODELS

from proxsparse.data.calibration import single_samples
from proxsparse.methods.walk import capture_samples, same_arguments, walk
from proxsparse.models.layers import decoder_blocks, prunable_layers


class Inputs:
    """Statistics that keep every input row."""

    def __init__(self, layer):
        self.rows, self.tokens, self.sums = [], 0, torch.zeros(layer.in_features)

    def add(self, inputs):
        self.rows.append(inputs.clone())
        self.tokens += len(inputs)
        self.sums += inputs.sum(0)


@pytest.mark.parametrize("family", MODELS)
def test_an_unpruned_model_is_replayed_exactly(family, tiny_model, batches):
    """Samples longer than any length that the config names run as they are."""
    model, walked = tiny_model(family), {}
    model.config.get_text_config().max_position_embeddings = 4
    walk(model, prunable_layers(model), batches, Inputs, walked.update)
    expected = hooked_inputs(model, batches)
    assert walked.keys() == expected.keys()
    for name, rows in expected.items():
        assert len(rows) == len(walked[name].rows)
        assert all(map(torch.equal, rows, walked[name].rows))


def test_only_mixed_models_take_whole_passes(tiny_model, batches):
    """Where all decoder blocks are called alike, no pass but the first goes beyond the first of them."""
    whole_passes = {}
    for name in MODELS:
        model, last = tiny_model(name), []
        decoder_blocks(model)[-1].register_forward_pre_hook(lambda *_, last=last: last.append(1))
        texts = list(single_samples(batches))
        samples = capture_samples(model, decoder_blocks(model), texts)
        assert [len(sample.calls) for sample in samples] == [2] * len(texts)
        whole_passes[name] = len(last)
    # one more compares the arguments
    assert whole_passes == {name: len(texts) + 1 if name in MIXED else 1 for name in MODELS}


def test_the_longest_text_tells_a_mixed_model(tiny_model):
    """The texts that fit into the sliding window get no mask at all, in either kind of decoder block."""
    texts = [torch.arange(3, 3 + length)[None] for length in (3, 17)]
    short, long = capture_samples(model := tiny_model("qwen2-mixed"), decoder_blocks(model), texts)
    assert same_arguments(short.calls)
    assert not same_arguments(long.calls)


def test_one_decoder_block_of_statistics_at_a_time(tiny_model, batches):
    """When the first statistics of a decoder block are made, those of the one before are gone."""
    alive, most = weakref.WeakSet(), []

    class Counted(Inputs):
        def __init__(self, layer):
            super().__init__(layer)
            alive.add(self)
            most.append(len(alive))

    model = tiny_model()
    walk(model, prunable_layers(model), batches, Counted, lambda statistics: None)
    assert max(most) == 7
    assert len(most) == 14
