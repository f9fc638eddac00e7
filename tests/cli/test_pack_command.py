"""`proxsparse.pack` from the command line: a pruned checkpoint to a packed one and back, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pruned import pruned_model
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from proxsparse import evaluate, pack, prune, train
from proxsparse.errors import run_command
from proxsparse.inference import packed_checkpoint
from proxsparse.io.mask_files import load_masks
from proxsparse.io.output_folder import MARKER, write_marker

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, tiny_llama):
    """What proxsparse.prune leaves behind."""
    folder = tmp_path_factory.mktemp("runs") / "llama"
    flags = ["--method", "magnitude", "--model", str(tiny_llama), "--output_dir", str(folder), "--eval_data", "none"]
    assert prune.main(flags) == 0
    return folder


@pytest.fixture(scope="module")
def packed_dir(tmp_path_factory, run_dir):
    """The same, packed."""
    folder = tmp_path_factory.mktemp("packed") / "llama"
    assert pack.main([str(run_dir), "--output_dir", str(folder)]) == 0
    return folder


def model_tensors(folder):
    paths = [path for path in folder.glob("*.safetensors") if path.name != "masks.safetensors"]
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def refused(capsys, main, arguments, *words):
    """The command fails with one line that holds all the words."""
    code = run_command(lambda: main([str(argument) for argument in arguments]))
    lines = capsys.readouterr().err.strip().splitlines()
    assert code != 0
    assert lines[-1].startswith("error: ")
    assert all(word in lines[-1] for word in words), lines[-1]


def test_there_and_back(run_dir, packed_dir, tmp_path):
    assert pack.main([str(packed_dir), "--unpack", "--output_dir", str(tmp_path / "dense")]) == 0
    before, after = model_tensors(run_dir), model_tensors(tmp_path / "dense")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), after[name].view(torch.int16)), name
    for name in ("config.json", "generation_config.json", "masks.safetensors", "README.md", *TOKENIZER):
        assert (tmp_path / "dense" / name).read_bytes() == (run_dir / name).read_bytes(), name


def test_there_and_back_without_a_card(run_dir, tmp_path):
    source = copy(run_dir, tmp_path / "source")
    (source / "README.md").unlink()
    assert pack.main([str(source), "--output_dir", str(tmp_path / "packed")]) == 0
    assert pack.main([str(tmp_path / "packed"), "--unpack", "--output_dir", str(tmp_path / "dense")]) == 0
    assert not (tmp_path / "dense" / "README.md").exists()


def test_what_is_written(run_dir, packed_dir):
    names = {path.name for path in packed_dir.iterdir()}
    model = {"config.json", "generation_config.json", "model.safetensors", "masks.safetensors", "README.md"}
    assert names == model | TOKENIZER | {MARKER}
    assert load_masks(packed_dir / "masks.safetensors").keys() == load_masks(run_dir / "masks.safetensors").keys()
    assert "import proxsparse" in (packed_dir / "README.md").read_text()
    config = json.loads((packed_dir / "config.json").read_text())
    assert len(config.pop("quantization_config")["layers"]) == 14
    assert config == json.loads((run_dir / "config.json").read_text())


def test_the_summary_tells_the_bytes(run_dir, tmp_path, capsys):
    pack.main([str(run_dir), "--output_dir", str(tmp_path / "packed")])
    printed = capsys.readouterr().out
    assert "packed 14 of 15 nn.Linear layers" in printed
    assert "0.562 of it" in printed
    assert str(tmp_path / "packed") in printed


def test_shards_and_one_shard_of_memory(run_dir, tmp_path, monkeypatch):
    held = []
    save = packed_checkpoint.write_shard

    def watched(folder, shard, number):
        held.append(sum(tensor.numel() * tensor.element_size() for tensor in shard.values()))
        return save(folder, shard, number)

    monkeypatch.setattr(packed_checkpoint, "write_shard", watched)
    flags = [str(run_dir), "--output_dir", str(tmp_path / "packed"), "--max_shard_size", "20KB"]
    assert pack.main(flags) == 0
    assert len(held) > 2
    assert max(held) <= 20_000
    files = sorted(path.name for path in (tmp_path / "packed").glob("model-*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    index = json.loads((tmp_path / "packed" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(held)
    assert index["weight_map"].keys() == model_tensors(tmp_path / "packed").keys()
    assert pack.main([str(tmp_path / "packed"), "--unpack", "--output_dir", str(tmp_path / "dense")]) == 0
    assert model_tensors(tmp_path / "dense").keys() == model_tensors(run_dir).keys()


def test_a_card_gets_a_note_and_loses_it_again(run_dir, tmp_path):
    source = copy(run_dir, tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    pack.main([str(source), "--output_dir", str(tmp_path / "packed")])
    card = (tmp_path / "packed" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n")
    assert "--unpack" in card
    pack.main([str(tmp_path / "packed"), "--unpack", "--output_dir", str(tmp_path / "dense")])
    assert (tmp_path / "dense" / "README.md").read_text() == "---\nlicense: mit\n---\n# Tiny\n"


def test_include_and_exclude(run_dir, tmp_path):
    flags = [str(run_dir), "--output_dir", str(tmp_path), "--include", "mlp", "--exclude", r"layers\.0\."]
    assert pack.main(flags) == 0
    layers = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["layers"]
    assert layers == [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]


def test_overwriting_leaves_nothing_of_what_was_there(run_dir, tmp_path, capsys):
    target = tmp_path / "packed"
    assert pack.main([str(run_dir), "--output_dir", str(target), "--max_shard_size", "20KB"]) == 0
    refused(capsys, pack.main, [run_dir, "--output_dir", target], "not empty", "--overwrite_output_dir")
    assert pack.main([str(run_dir), "--output_dir", str(target), "--overwrite_output_dir"]) == 0
    assert sorted(path.name for path in target.glob("model*")) == ["model.safetensors"]


def test_an_interrupted_pack_leaves_nothing(run_dir, tmp_path, monkeypatch):
    def interrupted(*_arguments, **_keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(pack, "copy_files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack.main([str(run_dir), "--output_dir", str(tmp_path / "packed")])
    assert not (tmp_path / "packed").exists()


def test_evaluate_takes_a_packed_folder(run_dir, packed_dir, text_file, capsys):
    scores = []
    for folder in (run_dir, packed_dir):
        flags = ["--data", str(text_file), "--seq_len", "32", "--max_windows", "2", "--precision", "fp32", "--json"]
        assert evaluate.main([str(folder), *flags]) == 0
        scores.append(json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"])
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)


def copy(source, folder):
    """A folder of one's own with the same files."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_folder_named_like_a_file_survives_overwriting(run_dir, tmp_path):
    assert pack.main([str(run_dir), "--output_dir", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "vocab.json").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("damaged")
    assert pack.main([str(run_dir), "--output_dir", str(tmp_path / "out"), "--overwrite_output_dir"]) == 0
    assert (tmp_path / "out" / "vocab.json").is_dir()
    assert len(model_tensors(tmp_path / "out")) > 14


def test_what_a_killed_pack_leaves_is_no_obstacle(run_dir, tmp_path):
    write_marker(tmp_path, {"format": "", "run_id": "1", "command": "pack", "settings": {}, "others": []})
    (tmp_path / ".incomplete").mkdir()
    (tmp_path / ".incomplete" / "0.part").write_text("half")
    assert pack.main([str(run_dir), "--output_dir", str(tmp_path)]) == 0
    assert not (tmp_path / ".incomplete").exists()


def test_code_of_a_checkpoint_never_runs(run_dir, tmp_path, monkeypatch, capsys):
    folder = copy(run_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    refused(capsys, pack.main, [folder, "--output_dir", tmp_path / "out"], "auto_map", "never run")
    refused(capsys, evaluate.main, [folder, "--data", "builtin"], "auto_map", "never run")
    assert not (tmp_path / "ran").exists()


def test_a_layer_that_is_tied_is_refused_only_where_it_is_named(tmp_path, capsys):
    model = pruned_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "model")
    flags = [tmp_path / "model", "--output_dir", tmp_path / "out"]
    refused(capsys, pack.main, [*flags, "--include", "mlp", "lm_head"], "lm_head: its weight is tied")
    assert pack.main([str(flag) for flag in flags]) == 0


def test_nothing_is_written_before_all_is_decided(tiny_llama, run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packed_checkpoint, "write_shard", lambda *_: pytest.fail("written"))
    refused(capsys, pack.main, [tiny_llama, "--output_dir", tmp_path / "a"], "nothing to pack")
    spoiled = copy(run_dir, tmp_path / "spoiled")
    rewrite(lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][0, :4].fill_(1.0))(spoiled)
    refused(capsys, pack.main, [spoiled, "--output_dir", tmp_path / "b"], "1 of 512 blocks")


def test_a_base_model_is_refused_for_its_names(tmp_path, capsys):
    pruned_model().model.save_pretrained(tmp_path / "model")
    words = "embed_tokens.weight", "LlamaForCausalLM", "model.layers.0.self_attn.q_proj.weight"
    refused(capsys, pack.main, [tmp_path / "model", "--output_dir", tmp_path / "out"], *words)


def test_weights_in_other_forms_and_links_out_of_the_folder_are_not_copied(run_dir, tmp_path, capsys):
    cache = tmp_path / "models--tiny"
    (cache / "snapshots").mkdir(parents=True)
    folder = copy(run_dir, cache / "snapshots" / "0a1b")
    for name in ("tf_model.h5", "flax_model.msgpack", "consolidated.00.pth", "model.onnx", "rust_model.ot", "w.pt"):
        (folder / name).write_bytes(b"weights")
    (cache / "blobs").mkdir()
    (cache / "blobs" / "77").write_text("a template")
    (tmp_path / "secret").write_text("not for publishing")
    (folder / "chat_template.jinja").symlink_to("../../blobs/77")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(tmp_path / "secret")
    (folder / "alias.json").symlink_to("generation_config.json")
    assert pack.main([str(folder), "--output_dir", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    added = {"chat_template.jinja", "alias.json", "README.md"}
    model = {"config.json", "generation_config.json", "model.safetensors", "masks.safetensors"}
    assert names == model | TOKENIZER | added | {MARKER}
    assert b"publishing" not in (tmp_path / "out" / "README.md").read_bytes()
    assert "notes.txt" in capsys.readouterr().err


def test_a_card_in_any_encoding(run_dir, tmp_path):
    folder, card = copy(run_dir, tmp_path / "model"), b"\xff\xfe caf\xe9"
    (folder / "README.md").write_bytes(card)
    assert pack.main([str(folder), "--output_dir", str(tmp_path / "packed")]) == 0
    assert (tmp_path / "packed" / "README.md").read_bytes().startswith(card)
    assert pack.main([str(tmp_path / "packed"), "--unpack", "--output_dir", str(tmp_path / "dense")]) == 0
    assert (tmp_path / "dense" / "README.md").read_bytes() == card


@pytest.mark.parametrize("command", [train.main, lambda arguments: prune.main(["--method", "magnitude", *arguments])])
def test_a_packed_model_cannot_be_pruned(command, packed_dir, text_file, tmp_path, capsys):
    flags = ["--model", packed_dir, "--data", text_file, "--output_dir", tmp_path / "run", "--eval_data", "none"]
    refused(capsys, command, flags, "proxsparse", "--unpack")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["absent"], ["absent", "config.json"]),
        (["{run}", "--max_shard_size", "0"], ["--max_shard_size 0"]),
        (["{run}", "--max_shard_size", "5 boxes"], ["--max_shard_size 5 boxes", "5GB"]),
        (["{run}", "--output_dir", "{run}"], ["folder of the model"]),
        (["{run}", "--unpack"], ["not packed"]),
        (["{packed}"], ["not dense", "proxsparse"]),
        (["{packed}", "--unpack", "--include", "mlp"], ["--unpack", "--include"]),
        (["{run}", "--include", "("], ["regular expression"]),
        (["{run}", "--exclude", "proj"], ["nothing to pack"]),
        (["{run}", "--include", "lm_head"], ["lm_head", "blocks are not 2:4"]),
        (["{dense}"], ["nothing to pack", "proxsparse prune"]),
    ],
)
def test_wrong_flags(flags, words, tiny_llama, run_dir, packed_dir, tmp_path, capsys):
    folders = {"{run}": run_dir, "{packed}": packed_dir, "{dense}": tiny_llama}
    flags = [folders.get(word, word) for word in flags]
    target = [] if "--output_dir" in flags else ["--output_dir", tmp_path / "out"]
    refused(capsys, pack.main, [*flags, *target], *words)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def rewrite(change):
    """A way to damage a folder: load its tensors, change them, write them."""

    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def index_of(content):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(content)


def forget_layer(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["layers"].remove(UP)
    (folder / "config.json").write_text(json.dumps(config))


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("packed", "damage", "words"),
    [
        (False, cut, ["model.safetensors", "cut off"]),
        (False, lambda folder: (folder / "model.safetensors").unlink(), ["no model.safetensors"]),
        (False, index_of('{"weight_map": {"a": "b.safetensors"}}'), ["no b.safetensors"]),
        (False, index_of('{"weights": 1}'), ["index.json is malformed"]),
        (False, index_of('{"weight_map": {}}'), ["index.json holds no tensors"]),
        (False, lambda folder: save_file({}, folder / "model.safetensors"), ["model.safetensors holds no tensors"]),
        (False, lambda folder: (folder / "config.json").write_text("{"), ["config.json", "malformed"]),
        (False, lambda folder: (folder / "config.json").write_text("{}"), ["config.json"]),
        (False, rewrite(lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"][1:]})), [UP, "[63, 32]", "[64, 32]"]),
        (False, rewrite(lambda t: t[f"{UP}.weight"][0, :4].fill_(1.0)), [UP, "1 of 512 blocks", "exclude"]),
        (True, cut, ["model.safetensors", "cut off"]),
        (True, rewrite(lambda t: t.pop(f"{UP}.indices")), [UP, "no file has"]),
        (True, rewrite(lambda t: t[f"{UP}.indices"].zero_()), ["model.safetensors", UP, "out of order"]),
        (
            True,
            rewrite(lambda t: t.update({f"{UP}.weight": torch.zeros(64, 32)})),
            [f"{UP}.weight", "lists this layer"],
        ),
        (True, forget_layer, [f"{UP}.indices", "config.json does not list"]),
    ],
)
def test_damaged_folders(packed, damage, words, run_dir, packed_dir, tmp_path, capsys):
    folder = copy(packed_dir if packed else run_dir, tmp_path / "damaged")
    damage(folder)
    flags = [folder, "--output_dir", tmp_path / "out", *(["--unpack"] if packed else [])]
    refused(capsys, pack.main, flags, *words)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_mixture_packs_its_attention_only(tmp_path, text_file):
    model = save_tiny_model("mixtral", tmp_path / "model")
    flags = ["--method", "magnitude", "--model", str(model), "--output_dir", str(tmp_path / "run")]
    assert prune.main([*flags, "--eval_data", "none"]) == 0
    assert pack.main([str(tmp_path / "run"), "--output_dir", str(tmp_path / "packed")]) == 0
    layers = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["layers"]
    assert layers == [f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qkvo"]


def test_as_a_program(tmp_path):
    command = [sys.executable, "-m", "proxsparse.pack", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
