"""A walk that was stopped continues after the decoder blocks that are kept on disk, and ends with the same bits."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxsparse.io.output_folder import FINISHED_BLOCKS
from proxsparse.methods import finished_blocks, get_method, list_methods, prune_, walk
from proxsparse.methods.store import Store
from proxsparse.run.resume import digest_of, load_start

BY_BLOCK = [name for name in list_methods() if get_method(name).keeps == "blocks"]


@pytest.fixture
def store(tmp_path):
    """Of a run that has begun."""
    (tmp_path / FINISHED_BLOCKS).mkdir()
    return Store(tmp_path)


@pytest.fixture
def blocks(store):
    return store.directory / FINISHED_BLOCKS


class Stopped(Exception):
    """In the place of a kill."""


@pytest.fixture
def prune_first(monkeypatch, batches, store):
    """prune_first(model, method): the walk ends as soon as the first decoder block is kept in the store."""

    def save(*arguments):
        finished_blocks.save_block(*arguments)
        raise Stopped

    def prune(model, method, **options):
        with monkeypatch.context() as patch:
            patch.setattr(walk, "save_block", save)
            with pytest.raises(Stopped):
                prune_(model, method, batches, store=store, **options)

    return prune


@pytest.fixture
def visited(monkeypatch):
    """The indices of the decoder blocks whose inputs are collected from now on."""
    indices, statistics_of = [], walk.statistics_of
    count = lambda block, index, *rest: indices.append(index) or statistics_of(block, index, *rest)  # noqa: E731
    monkeypatch.setattr(walk, "statistics_of", count)
    return indices


def check_same(model, masks, other, other_masks):
    """The same masks in the same order, and parameters with the same bits."""
    assert list(masks) == list(other_masks)
    assert all(torch.equal(mask, other_masks[name]) for name, mask in masks.items())
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)), name


LEFT_OUT = {"pattern": "4:8", "exclude": ["down_proj", r"layers\.1\.self_attn"]}


@pytest.mark.parametrize("name", BY_BLOCK)
@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("llama", torch.float32, {}),
        ("llama", torch.bfloat16, LEFT_OUT),
        ("gpt2", torch.float32, {}),
        ("mixtral", torch.float32, {}),
        ("gemma2-mixed", torch.float32, {}),
    ],
)
def test_a_stopped_walk_continues_with_the_same_bits(
    name, family, dtype, options, tiny_model, batches, prune_first, visited, store, blocks
):
    undisturbed, stopped, resumed, complete = (tiny_model(family, dtype) for _ in range(4))
    masks = prune_(undisturbed, name, batches, **options)
    prune_first(stopped, name, **options)
    visited.clear()
    for model in (resumed, complete):
        check_same(undisturbed, masks, model, prune_(model, name, batches, store=store, **options))
        assert visited == [1]
    if family == "llama":
        second = "model.layers.1.mlp.safetensors" if options else "model.layers.1.safetensors"
        assert {path.name for path in blocks.iterdir()} == {"model.layers.0.safetensors", second}
        weights = [key for key in load_file(blocks / "model.layers.0.safetensors") if key.endswith(".weight")]
        assert bool(weights) == get_method(name).updates_weights


def test_what_keeps_no_blocks_leaves_the_folder_alone(tiny_model, batches, store, blocks):
    for name in set(list_methods()) - set(BY_BLOCK) - {"proxsparse"}:
        prune_(tiny_model(), name, batches, store=store)
    assert not list(blocks.iterdir())


def change(edit):
    def damage(path):
        edit(tensors := load_file(path))
        save_file(tensors, path)

    return damage


MASK, WEIGHT = "model.layers.0.mlp.up_proj.mask", "model.layers.0.mlp.up_proj.weight"  # [64, 32]
DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "no mask": change(lambda tensors: tensors.pop(MASK)),
    "another layer": change(lambda tensors: tensors.update({"other.mask": torch.zeros(1)})),
    "not 2:4": change(lambda tensors: tensors[MASK].zero_()),
    "mask of bools": change(lambda tensors: tensors.update({MASK: torch.ones(64, 4) > 0})),
    "mask too small": change(lambda tensors: tensors.update({MASK: tensors[MASK][:32].clone()})),
    "weight too small": change(lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:32].clone()})),
    "weight in bf16": change(lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].bfloat16()})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_pruned_again(damage, tiny_model, batches, prune_first, visited, store, blocks, capsys):
    undisturbed, stopped, resumed = (tiny_model() for _ in range(3))
    masks = prune_(undisturbed, "sparsegpt", batches)
    prune_first(stopped, "sparsegpt")
    DAMAGES[damage](path := blocks / "model.layers.0.safetensors")
    visited.clear()
    if damage == "a folder":  # not written by this program, so it is not replaced
        with pytest.raises(OSError, match=r"layers\.0"):
            prune_(resumed, "sparsegpt", batches, store=store)
    else:
        check_same(undisturbed, masks, resumed, prune_(resumed, "sparsegpt", batches, store=store))
    assert visited[0] == 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"{path} is damaged (")
    assert line.endswith("pruned again")


def test_a_later_block_is_kept_when_an_earlier_one_is_pruned_again(tiny_model, batches, visited, store, blocks):
    undisturbed, resumed = tiny_model(), tiny_model()
    masks = prune_(undisturbed, "admm", batches, store=store)
    (blocks / "model.layers.0.safetensors").unlink()
    visited.clear()
    check_same(undisturbed, masks, resumed, prune_(resumed, "admm", batches, store=store))
    assert visited == [0]


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"patterns": {}}', b"\xff", b"[" * 100_000])
def test_a_damaged_start_is_reported(content, store, blocks, capsys):
    (blocks / "start.json").write_bytes(content)
    assert load_start(store, ["a"], "digest") is None
    assert "start.json is damaged" in capsys.readouterr().err


def test_the_digest_tells_other_models_and_samples(tiny_model, batches):
    digest = digest_of(tiny_model(), batches)
    assert digest == digest_of(tiny_model(), iter(batches))
    changed = tiny_model()
    changed.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    models = [changed, tiny_model(dtype=torch.bfloat16), tiny_model("gpt2")]
    others = [*(digest_of(model, batches) for model in models), digest_of(tiny_model(), batches[:2])]
    assert len({digest, *others}) == 5
