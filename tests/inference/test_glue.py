"""Compiled glue: the tokens of the eager step, one compilation for all blocks, fewer kernels, and a restored model."""

import collections
import sys

import pytest
import torch
from pruned import prune_
from tiny_models import MODELS, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from proxsparse.inference import glue
from proxsparse.inference.convert import sparsify_
from proxsparse.inference.generate import GreedyDecoder, generate
from proxsparse.inference.glue import CompiledGlue, with_compiled_glue
from proxsparse.inference.merge import merge_projections_

FAMILIES = {"llama": 3, "mistral": 3, "qwen3": 5, "gemma3-mixed": 5}
IDS = torch.randint(3, 260, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def compiler():
    """A backend of torch.compile that runs the graph as it is; `graphs` holds what it was given."""
    torch.compiler.reset()
    backend = lambda graph, inputs: backend.graphs.append(graph) or graph.forward  # noqa: E731
    backend.graphs = []
    yield backend
    torch.compiler.reset()


def decode(model, new_tokens, faster):
    decoder = GreedyDecoder(model, len(IDS), IDS.shape[1] + new_tokens, faster)
    tokens = [decoder.prefill(IDS).clone(), *(decoder.step().clone() for _ in range(new_tokens - 1))]
    return torch.cat([IDS, *tokens], 1)


def model_of(name, form, dtype=torch.float32, **more):
    model = prune_(tiny_model(name, dtype, **more))
    model = sparsify_(model) if form.startswith("sparse") else model
    return merge_projections_(model) if form.endswith("merged") else model


def assert_restored(model, rotary):
    assert sys.modules[type(model).__module__].apply_rotary_pos_emb is rotary
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is masking_utils.sdpa_mask
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("form", ["dense", "sparse", "sparse+merged"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_are_those_of_the_eager_step(name, form, compiler):
    model = model_of(name, form)
    expected = generate(model, IDS, 12)  # beyond the sliding windows
    assert torch.equal(decode(model, 12, with_compiled_glue(model, backend=compiler)), expected)
    # RMSNorm of the block, of the heads of q and of those of k; rotary; act * up: for all blocks together
    assert len(compiler.graphs) == FAMILIES[name]


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(FAMILIES)))
def test_what_is_not_known_stays_eager(name, compiler):
    model = tiny_model(name)
    expected = generate(model, IDS, 4)
    assert torch.equal(decode(model, 4, with_compiled_glue(model, backend=compiler)), expected)
    assert bool(compiler.graphs) == (name not in ("opt", "gpt2"))


@pytest.mark.slow
def test_inductor():
    """The real compiler, once."""
    torch.compiler.reset()
    model = model_of("llama", "sparse+merged")
    expected = generate(model, IDS, 6)
    assert torch.equal(generate(model, IDS, 6, compile_glue=True), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["dense", "dense+merged", "sparse", "sparse+merged"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cuda_graph_with_glue(name, form):
    torch.compiler.reset()
    model, input_ids = model_of(name, form).cuda(), IDS.cuda()
    model = merge_projections_(model) if form.endswith("merged") else model  # moving it has split it
    expected = generate(model, input_ids, 12, cuda_graph=False)
    assert torch.equal(generate(model, input_ids, 12, compile_glue=True), expected)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_graph_is_captured_with_glue_and_the_model_is_restored_at_once(compiler):
    """What `capture_graph` does, without a GPU: the step runs a few times; what it ran then is what is replayed."""
    model = tiny_model("llama")
    norm, language = model.model.layers[0].input_layernorm, sys.modules[type(model).__module__]
    rotary, seen = language.apply_rotary_pos_emb, []

    def faster(step):
        for _ in range(4):
            step()
        seen.append(("forward" in vars(norm), language.apply_rotary_pos_emb is rotary))
        return step

    expected = generate(model, IDS, 4)
    assert torch.equal(decode(model, 4, with_compiled_glue(model, faster, compiler)), expected)
    assert seen == [(True, False)]
    assert_restored(model, rotary)
    with pytest.raises(ZeroDivisionError):
        CompiledGlue(model, compiler).around(lambda: 1 / 0)()
    assert_restored(model, rotary)


def test_a_forward_that_another_library_has_set_is_left_alone(compiler):
    model = tiny_model("llama")
    norm, calls = model.model.norm, []
    norm.forward = own = lambda x: (calls.append(1), type(norm).forward(norm, x))[1]
    decode(model, 3, with_compiled_glue(model, backend=compiler))
    assert norm.forward is own
    assert calls


def test_only_the_known_gated_mlp_is_one():
    def known(self, hidden):
        """Another name for the input, and a docstring."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))

    def swapped(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    def added(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))

    def scaled(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2

    mlps = [m for name in FAMILIES for m in tiny_model(name).modules() if type(m).__name__.endswith("MLP")]
    assert len(mlps) == 2 * len(FAMILIES)
    assert all(glue.is_gated_mlp(forward) for forward in (known, *(type(mlp).forward for mlp in mlps)))
    assert not any(glue.is_gated_mlp(other) for other in (swapped, added, scaled, torch.relu))


VIEWS = {"view", "t", "transpose", "unsqueeze", "slice", "expand", "_unsafe_view", "select", "alias", "detach", "split"}
VIEWS |= {"narrow", "permute", "reshape", "squeeze", "empty"}


class Kernels(TorchDispatchMode):
    """Counts the operations that are a kernel on a GPU; within `paused` none."""

    def __init__(self):
        super().__init__()
        self.found, self.paused = collections.Counter(), False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not self.paused and name not in VIEWS:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))

    def fused(self, function, **_options):
        """In the place of torch.compile: one kernel, for the rotary embedding one for q and one for k."""

        def call(*arguments, **named):
            self.paused = True
            try:
                return function(*arguments, **named)
            finally:
                self.paused = False
                self.found[function.__name__] += 2 if function.__name__ == glue.ROTARY else 1

        return call


def kernels_a_block(name, form, with_glue, monkeypatch) -> collections.Counter:
    """Those of a step in 3 blocks less those in 2, by name."""
    counts = []
    for blocks in (2, 3):
        model, mode = model_of(name, form, torch.bfloat16, num_hidden_layers=blocks), Kernels()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", mode.fused)
            decoder = GreedyDecoder(model, 1, 16, with_compiled_glue(model) if with_glue else None)
        decoder.prefill(IDS[:1])
        mode.found.clear()
        with mode:
            decoder.step()
        counts.append(mode.found)
    return counts[1] - counts[0]


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_kernels_a_block(name, form, monkeypatch):
    """In bfloat16: RMSNorm 16 -> 2, rotary 10 -> 2, act * up 2 -> 1, mask 3 -> 0; q, k, v and gate, up 5 -> 2.

    How many others there are depends on the version of transformers.
    """
    eager = kernels_a_block(name, form, False, monkeypatch)
    assert not eager.keys() & {"arange", "add_"}  # the blocks count no tokens of their own
    for less, merged, with_glue in ((3, "+merged", False), (26, "", True), (29, "+merged", True)):
        assert kernels_a_block(name, form + merged, with_glue, monkeypatch).total() == eager.total() - less
