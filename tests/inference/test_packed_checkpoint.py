"""Packed checkpoints in transformers: loaded straight into SparseLinear, saved bit for bit, refused when damaged."""

import json
import re
import shutil

import pytest
import torch
import transformers
from commands import config_of
from family_models import family_model
from pruned import packed_copy, prune_, pruned_model, tensors_of
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import MODELS, NOT_PACKED, tiny_model

from proxsparse import SparseLinear, sparsify_
from proxsparse.inference import packed_checkpoint
from proxsparse.inference.convert import unsparsify_
from proxsparse.integrations.transformers_quantizer import PackedConfig
from proxsparse.pack import main as pack

TOKENS = torch.arange(3, 23).view(2, 10)
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
LAYER = "model.layers.1.mlp.up_proj"
QUICK = ("llama", "qwen2", "mixtral", "gemma3-mixed")
load = transformers.AutoModelForCausalLM.from_pretrained


def assert_same_files(first, second):
    """Equal tensors and an equal config.json; save_pretrained does not write the entry `transformers_weights`."""
    configs = [config_of(folder) for folder in (first, second)]
    for config in configs:
        config.pop("transformers_weights", None)
    assert configs[0] == configs[1]
    one, two = tensors_of(first), tensors_of(second)
    assert one.keys() == two.keys()
    assert all(tensor.dtype == two[name].dtype and torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.fixture
def dense(folders):
    return load(folders[0])


@pytest.fixture
def packed(folders):
    return load(folders[1])


def packed_layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}


@pytest.fixture(scope="module")
def folder_of(folders, tmp_path_factory):
    """bits -> a packed folder."""
    made = {16: folders[1]}
    for bits in (8, 4):
        flags = ["--bits", str(bits)]
        made[bits] = packed_copy(tmp_path_factory.mktemp("codes"), dtype=torch.float32, flags=flags)[1]
    return made


@pytest.fixture
def damaged(folder_of, tmp_path):
    """damaged(change_config, change_tensors, bits) -> a packed folder with these changes."""

    def make(change_config=lambda config: None, change_tensors=lambda tensors: None, bits=16):
        config, tensors = config_of(folder_of[bits]), tensors_of(folder_of[bits])
        change_config(config["quantization_config"])
        change_tensors(tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return make


def refused(folder, *words):
    """Loading and unpacking it end with one line that holds the words, before anything is written."""
    for read in (load, lambda folder: pack([str(folder), "--unpack", "--output_dir", str(folder / "dense")])):
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
            read(folder)
        assert all(word in str(error.value) for word in words), error.value
        assert "\n" not in str(error.value)
    assert not (folder / "dense").exists()


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in sorted(set(MODELS) - NOT_PACKED)]
)
@torch.no_grad()
def test_families_load_packed_and_generate_the_same(name, tmp_path):
    dense, packed = (load(folder) for folder in packed_copy(tmp_path, name, torch.float32))
    linears = {n for n, module in dense.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    assert packed_layers(packed).keys() == linears
    assert not any(layer.values.requires_grad for layer in packed_layers(packed).values())
    logits, tokens = dense(TOKENS).logits, dense.generate(TOKENS, **GREEDY)
    torch.testing.assert_close(packed(TOKENS).logits, logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(packed.generate(TOKENS, **GREEDY), tokens)
    packed.save_pretrained(tmp_path / "again")
    assert_same_files(tmp_path / "packed", tmp_path / "again")
    assert packed_layers(sparsify_(dense)).keys() == linears
    assert torch.equal(dense(TOKENS).logits, packed(TOKENS).logits)


# types whose files have one tensor for several layers; transformers merges all their tensors, of hrm_text only weights
@pytest.mark.parametrize("include", [None, pytest.param(["0.*q_proj", "in_proj_z"], marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["lara_mini", "sarvam_moe", "hrm_text"])
@torch.no_grad()
def test_layers_that_transformers_merges_in_the_files(name, include, tmp_path, capsys):
    prune_(family_model(name)).save_pretrained(tmp_path / "dense")
    dense = sparsify_(load(tmp_path / "dense"), include=include)
    logits = dense(TOKENS).logits
    dense.save_pretrained(tmp_path / "packed")
    load(tmp_path / "packed").save_pretrained(tmp_path / "again")
    for folder in ("packed", "again"):
        packed = load(tmp_path / folder)
        assert packed_layers(packed).keys() == packed_layers(dense).keys()
        assert torch.equal(packed(TOKENS).logits, logits)
    command = [str(tmp_path / "dense"), "--output_dir"]
    assert pack([*command, str(tmp_path / "command")]) == 0
    assert re.search(r"note: [128] N:M tensors stay dense, the first is model\S+: transf", capsys.readouterr().out)
    with pytest.raises(ValueError, match="the files store its weight joined with others or split, which only"):
        pack([*command, str(tmp_path / "none"), "--include", *(include or ["."])])
    unsparsify_(dense).save_pretrained(tmp_path / "unpacked")
    assert_same_files(tmp_path / "unpacked", tmp_path / "dense")


def test_unpacked_it_saves_the_dense_checkpoint(folders, tmp_path):
    loaded = load(folders[1])
    loaded.save_pretrained(tmp_path / "packed")  # replaces the dtype of the config by its name
    for unpacked in (unsparsify_(load(folders[1])), loaded.dequantize() or loaded):
        unpacked.save_pretrained(tmp_path / "dense")
        assert_same_files(tmp_path / "dense", folders[0])


FORMS = [  # codes of a single other pattern are slow: the mixed model has some
    pytest.param("llama", patterns, bits, marks=[pytest.mark.slow] * (bits < 16 and patterns[0] != "2:4"))
    for patterns in (["2:4"], ["4:6"], ["6:8"], ["8:10"], ["2:4", "6:8"])
    for bits in (16, 8, 4)
] + [("mixtral", ["6:8"], 16)]  # of a mixture the attention is packed


@pytest.mark.parametrize(("name", "patterns", "bits"), FORMS)
@torch.no_grad()
def test_every_pattern_and_every_number_of_bits(name, patterns, bits, tmp_path, capsys):
    model = tiny_model(name)
    for part, pattern in zip(("mlp", "self_attn"), patterns * 2, strict=False):
        prune_(model, pattern=pattern, but=("lm_head", part))
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    model.save_pretrained(dense)
    assert pack([str(dense), "--output_dir", str(packed), "--bits", str(bits)]) == 0
    assert ("more than dense weights of 4 bits" in capsys.readouterr().out) == (bits == 4 and patterns != ["2:4"])
    entry = config_of(packed)["quantization_config"]
    assert entry["format_version"] == 4
    assert entry["pattern"] == (patterns[0] if len(patterns) == 1 else "mixed")
    assert entry.get("bits", {}) == (dict.fromkeys(entry["layers"], bits) if bits < 16 else {})
    in_memory = sparsify_(load(dense), bits=bits)
    in_memory.save_pretrained(tmp_path / "saved")
    assert_same_files(packed, tmp_path / "saved")
    loaded = load(packed)
    last = entry["layers"][-1]
    assert (str(loaded.get_submodule(last).pattern), loaded.get_submodule(last).bits) == (patterns[-1], bits)
    assert load(packed, dtype=torch.bfloat16).get_submodule(last).dense_weight().dtype == torch.bfloat16
    assert torch.equal(loaded(TOKENS).logits, in_memory(TOKENS).logits)
    expected = unsparsify_(in_memory)
    torch.testing.assert_close(loaded(TOKENS).logits, expected(TOKENS).logits, rtol=1e-4, atol=1e-5)
    assert pack([str(packed), "--unpack", "--output_dir", str(tmp_path / "unpacked")]) == 0
    unpacked = load(tmp_path / "unpacked")
    for name, weight in (model if bits == 16 else expected).state_dict().items():
        assert torch.equal(unpacked.state_dict()[name], weight), name
    rounded, weight = (each.get_submodule(last).weight for each in (unpacked, model))
    assert (bits < 16) == (0 < (rounded - weight).norm() < 0.12 * weight.norm())


@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_layers_of_several_bits(bits, dense, tmp_path):
    model = sparsify_(sparsify_(dense, bits=bits, include=["mlp"]))
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert (loaded.get_submodule(LAYER).bits, loaded.model.layers[0].self_attn.q_proj.bits) == (bits, 16)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert loaded.dequantize().get_submodule(LAYER).weight.shape == (64, 32)


@torch.no_grad()
def test_no_dense_weight_is_ever_there(folders, monkeypatch):
    def watched_init(layer, *arguments, real=torch.nn.Linear.__init__, **keywords):
        real(layer, *arguments, **keywords)
        assert layer.weight.is_meta

    monkeypatch.setattr(torch.nn.Linear, "__init__", watched_init)
    monkeypatch.setattr("proxsparse.reference.pack.unpack_nm", lambda *_: pytest.fail("unpacked"))
    model = load(folders[1])
    assert len(packed_layers(model)) == 14
    for names in (model.state_dict(), tensors_of(folders[1])):
        assert not any(tensor.numel() for name, tensor in names.items() if name.endswith("proj.weight"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
def test_dtype(dtype, folders):
    dense, packed = (load(folder, dtype=dtype) for folder in folders)
    assert {p.dtype for p in packed.parameters()} == {torch.float32 if dtype == "auto" else dtype}
    assert torch.equal(packed.get_submodule(LAYER).dense_weight(), dense.get_submodule(LAYER).weight)
    for refused in (packed.half, packed.float):
        with pytest.raises(ValueError, match="quantized"):
            refused()
    for cast in (packed.to(torch.float16), sparsify_(dense).half()):
        assert {parameter.dtype for parameter in cast.parameters()} == {torch.float16}


def test_the_base_model_alone_loads_packed_and_saved_again(folders, tmp_path):
    dense, base = (transformers.AutoModel.from_pretrained(folder) for folder in folders)
    assert len(packed_layers(base)) == 14
    hidden = base(TOKENS).last_hidden_state
    torch.testing.assert_close(hidden, dense(TOKENS).last_hidden_state, rtol=1e-4, atol=1e-5)
    base.save_pretrained(tmp_path)
    assert torch.equal(transformers.AutoModel.from_pretrained(tmp_path)(TOKENS).last_hidden_state, hidden)


def test_shards_take_the_memory_of_one(tmp_path, monkeypatch):
    held, write = [], packed_checkpoint.write_shard

    def watched(folder, shard, number):
        held.append(sum(tensor.nbytes for tensor in shard.values()))
        return write(folder, shard, number)

    monkeypatch.setattr(packed_checkpoint, "write_shard", watched)
    dense, packed = packed_copy(tmp_path, flags=("--max_shard_size", "20KB"))
    assert max(held) <= 20_000
    shards = sorted(packed.glob("model-*-of-*.safetensors"))
    assert len(shards) == len(held) > 2
    index = json.loads((packed / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(held)
    assert index["weight_map"].keys() == tensors_of(packed).keys()
    model = load(packed)
    model.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert_same_files(tmp_path / "again", packed)
    assert torch.equal(model(TOKENS).logits, sparsify_(load(dense))(TOKENS).logits)
    assert pack([str(packed), "--unpack", "--output_dir", str(tmp_path / "unpacked")]) == 0
    assert_same_files(tmp_path / "unpacked", dense)
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    refused(packed, f"{shards[1].name}: damaged or truncated")


@torch.no_grad()
def test_device_map(packed, folders, tmp_path):
    layers = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"], "cpu")
    for device_map in ("cpu", layers | {"model.layers.1": "disk"}):
        placed = load(folders[1], device_map=device_map, offload_folder=tmp_path)
        assert torch.equal(placed(TOKENS).logits, packed(TOKENS).logits)


def test_tied_embeddings(tmp_path):
    model = pruned_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "dense")
    command = [str(tmp_path / "dense"), "--output_dir", str(tmp_path / "packed")]
    with pytest.raises(ValueError, match="lm_head: its weight is tied"):
        pack([*command, "--include", "mlp", "lm_head"])
    assert pack(command) == 0
    loaded = load(tmp_path / "packed")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.generate(TOKENS, **GREEDY), model.generate(TOKENS, **GREEDY))


def test_gives_gradients_to_others_and_compiles_into_one_graph(packed):
    packed(TOKENS, labels=TOKENS).loss.backward()
    assert packed.get_input_embeddings().weight.grad.abs().sum() > 0
    assert packed.get_submodule(LAYER).values.grad is None
    with torch.no_grad():
        compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(TOKENS).logits, packed(TOKENS).logits)


def set_entry(name, value):
    return lambda config: config.__setitem__(name, value)


def change(name, function):
    return lambda tensors: tensors.__setitem__(f"{LAYER}.{name}", function(tensors[f"{LAYER}.{name}"]).contiguous())


@pytest.mark.parametrize(("version", "bits"), [(2, 16), (3, 8), (3, 4)])
@torch.no_grad()
def test_folders_of_earlier_versions_load(version, bits, damaged, folder_of):
    """They differ in the number alone: all layers are 2:4."""
    expected = load(folder_of[bits])(TOKENS).logits
    assert torch.equal(load(damaged(set_entry("format_version", version), bits=bits))(TOKENS).logits, expected)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("config", set_entry("format_version", 5), ["format version 5", "update proxsparse"]),
        ("config", set_entry("format_version", 1), ["format version 1", "pack the dense checkpoint again"]),
        ("config", lambda config: config.pop("format_version"), ["format version None"]),
        ("config", set_entry("pattern", "1:4"), ["pattern 1:4", "2:4", "pack the dense checkpoint again"]),
        ("config", set_entry("pattern", "mixed"), ["`patterns`", "pack the dense checkpoint again"]),
        ("config", set_entry("pattern", "4:6"), ["q_proj.values", "[32, 16]", "[32, 22]"]),
        ("config", set_entry("bits", {LAYER: 8}), ["F32", "needs I8"]),
        ("config", set_entry("bits", {LAYER: 3}), ["`bits`", "8 or 4"]),
        ("config", set_entry("bits", {"lm_head": 8}), ["`bits`", "some of `layers`"]),
        ("config", set_entry("layers", []), ["`layers` must be", "config.json"]),
        ("config", set_entry("layers", ["model.layers.7.mlp.up_proj"]), ["model.layers.7.mlp.up_proj", "config.json"]),
        ("config", set_entry("layers", ["model.embed_tokens"]), ["model.embed_tokens", "no nn.Linear"]),
        ("config", lambda config: config["layers"].remove(LAYER), [f"{LAYER}.indices", "config.json does not list"]),
        ("tensors", lambda tensors: tensors.pop(f"{LAYER}.values"), ["no file has", f"{LAYER}.values"]),
        (
            "tensors",
            lambda tensors: tensors.update({f"{LAYER}.weight": torch.zeros(64, 32)}),
            [f"{LAYER}.weight", "lists this layer"],
        ),
        ("tensors", change("values", lambda t: t[:, :-2]), ["model.safetensors", "[64, 14]", "[64, 16]"]),
        ("tensors", change("values", lambda t: t.int()), ["I32", "BF16"]),
        ("tensors", change("indices", lambda t: t[:, :-1]), ["[64, 3]", "[64, 4]"]),
        ("tensors", change("indices", lambda t: t * 0), [LAYER, "out of order"]),
    ],
)
def test_a_damaged_folder_is_refused(part, change, words, damaged):
    refused(damaged(**{f"change_{part}": change}), *words)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(f"{LAYER}.scales"), ["no file has", f"{LAYER}.scales"]),
        (change("scales", lambda _: torch.ones(64)), ["scales is F32 [64]"]),
        # as proxsparse wrote them before its first release, for models that had codes of 4 bits
        (change("scales", lambda _: torch.ones(64, 1).int()), ["pack the pruned folder again"]),
        (change("scales", lambda t: t * 0 + torch.inf), ["up_proj: codes times scales are NaN or infinite"]),
        (change("scales", lambda t: t * 0 + 3e38), ["up_proj: codes times scales are NaN or infinite"]),
        (change("values", lambda _: torch.ones(64, 16)), ["values is F32"]),
        (change("indices", lambda t: t * 0), ["out of order"]),
    ],
)
def test_damaged_codes_are_refused(bits, change, words, damaged):
    refused(damaged(change_tensors=change, bits=bits), *words)


def test_too_many_layers_are_refused_before_transformers_creates_them(folders, tmp_path):
    folder = shutil.copytree(folders[1], tmp_path / "packed")
    config = config_of(folder) | {"num_hidden_layers": 2**31 - 1}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, f"{folder}/config.json", "num_hidden_layers is 2147483647", "at most 2048")


def without_files(folders):
    model = load(folders[1])
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("up_proj.values")}
    type(model).from_pretrained(None, config=transformers.AutoConfig.from_pretrained(folders[1]), state_dict=state)


def packed_while_loading(folders):
    entry = config_of(folders[1])["quantization_config"]
    load(folders[0], quantization_config=PackedConfig(**entry))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (without_files, "give its folder"),
        (packed_while_loading, "pre-quantized"),
        (lambda folders: PackedConfig(bits=8), r"PackedConfig: .* load it without .*, then call proxsparse\.sparsify_"),
        (
            lambda folders: transformers.AutoModelForQuestionAnswering.from_pretrained(folders[1]),
            r"QuestionAnswering has no nn\.Linear .* class that it was packed for",
        ),
    ],
)
def test_other_ways_to_load_are_refused(call, message, folders):
    with pytest.raises(ValueError, match=message):
        call(folders)


def test_the_format_of_the_files(folders):
    with safe_open(folders[1] / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice(f"{LAYER}.values").get_shape() == [64, 16]
        assert file.get_slice(f"{LAYER}.indices").get_dtype() == "U8"
        assert file.get_slice(f"{LAYER}.weight").get_shape() == [0]
    entry = config_of(folders[1])["quantization_config"]
    projections = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    assert entry.pop("layers") == [f"model.layers.{i}.{name}" for i in (0, 1) for name in projections]
    assert entry == {"quant_method": "proxsparse", "format_version": 4, "pattern": "2:4"}
