"""The Python front door refuses with one message that names the argument, before it changes the model."""

import copy

import pytest
import torch
from pruned import prune_ as prune_by_magnitude
from tiny_models import FEW, TEXTS, TOKENS, byte_tokenizer, tiny_model
from torch.nn.utils import prune as torch_prune
from torch.utils.data import DataLoader

import proxsparse
from proxsparse.errors import InputError
from proxsparse.models.snap import copy_weights
from proxsparse.pruning import front_door

COMPUTED = {
    "parametrization": lambda layer: torch.nn.utils.parametrizations.weight_norm(layer),
    "weight_norm": lambda layer: torch.nn.utils.weight_norm(layer),
    "prune": lambda layer: torch_prune.l1_unstructured(layer, "weight", 0.3),
}
UP_PROJ = "model.layers.0.mlp.up_proj"
CALLS = {
    "prune_": lambda m, t: proxsparse.prune_(m, "proxsparse", TEXTS, t, max_steps=1, **FEW),
    "finetune_": lambda m, t: proxsparse.finetune_(m, None, TEXTS, t, max_steps=1, **FEW),
    "apply_masks_": lambda m, t: proxsparse.apply_masks_(m, {UP_PROJ: torch.ones(64, 32).bool()}),
    "sparsify_": lambda m, t: proxsparse.sparsify_(m),
    "ProxOptimizer": lambda m, t: proxsparse.ProxOptimizer(torch.optim.SGD(m.parameters()), 0.1, model=m),
}


def enlarged(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([f"<{number}>" for number in range(9)])
    return tokenizer


def with_adapter(model):
    import peft

    return peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))


def with_tuples(model):
    model.config.return_dict = False
    return model


def offloaded(model):
    with torch.device("meta"):
        return type(model)(model.config)


def without_layers(_):
    model = tiny_model("llama")
    for block in model.model.layers:
        block.self_attn = block.mlp = torch.nn.Identity()
    return model


def packed(_):
    return proxsparse.sparsify_(prune_by_magnitude(tiny_model("llama")))


def splits(*names):
    datasets = pytest.importorskip("datasets")
    return datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": ["b"]}) for name in names})


def prunes(*data, method="wanda", model=lambda m: m, tokenizer=lambda t: t, **options):
    """A call of prune_ with the model and the tokenizer of the test, possibly changed."""
    return lambda m, t: proxsparse.prune_(model(m), method, *data, tokenizer=tokenizer(t), **options)


def prunes_tokens(**more):
    """The same for one sample of tokens with more fields."""
    return prunes([{"input_ids": TOKENS[0], **more}])


def prunes_without_data(model=lambda m: m, **options):
    return lambda m, t: proxsparse.prune_(model(m), "magnitude", **options)


def tunes(teacher=lambda m: None, **options):
    """A call of finetune_ with the model of the test, pruned."""
    return lambda m, t: proxsparse.finetune_(prune_by_magnitude(m), teacher(m), TEXTS, t, **options)


def tunes_dense(**options):
    return lambda m, t: proxsparse.finetune_(m, None, TEXTS, t, **options)


def measures(data, model=lambda m: m, tokenizer=lambda t: t, **options):
    return lambda m, t: proxsparse.perplexity(model(m), tokenizer(t), data, **options)


def masks(masks, model=lambda m: m):
    """A call of apply_masks_."""
    return lambda m, t: proxsparse.apply_masks_(model(m), masks)


def saves(masks, pattern=None, file="none"):
    return lambda m, t: proxsparse.save_masks(file, masks, pattern)


def learns(model):
    return lambda m, t: proxsparse.ProxOptimizer(torch.optim.SGD(m.parameters()), reg_lambda=0.1, model=model)


def other(**settings):
    """Another model in the place of that of the test."""
    return lambda m: tiny_model("llama", **settings)


HALF, ALL = (torch.arange(8) % 4 < 2)[None], torch.ones(260, 32).bool()
REFUSALS = [
    # data
    (prunes(method="proxsparse"), "data=None: method 'proxsparse' needs calibration text"),
    (prunes(5), "data=5: give the name of a source"),
    (prunes([]), "data: it is empty"),
    (prunes(TEXTS, tokenizer=lambda t: None), "tokenizer=None: texts need the tokenizer"),
    (prunes(TEXTS, tokenizer=lambda t: "gpt2"), "give AutoTokenizer.from_pretrained('gpt2')"),
    (prunes(["a", 1]), "data: 1 is not text"),
    (prunes([None]), "data: an item of type NoneType"),
    (prunes("none.txt"), "'none.txt': no such file"),
    (prunes("word " * 99), "a text, not the name of a source; give a list of texts"),
    (lambda m, t: prunes(splits("a"))(m, t), "data: a DatasetDict; give one of its splits, such as data['a']"),
    (lambda m, t: prunes(splits())(m, t), "data: a DatasetDict; give one of its splits, such as data['train']"),
    (prunes([{"text": [{"role": "user", "content": "a"}]}]), "'user'}] is not text; a row is"),
    (prunes(DataLoader([{"text": "a"}] * 2, batch_size=2)), "data, field 'text': ['a', 'a'] is not text; a row is"),
    (prunes([torch.rand(3)]), "data: input_ids, torch.float32 [3]: must be integers"),
    (prunes([torch.tensor([5])], method="proxsparse"), "data: no sample has a token to predict"),
    (prunes([torch.ones(200).long()]), "a sample has 200 tokens, the model's context length is 128; give seq_len"),
    (prunes([torch.tensor([1, 5000])]), "token ids from 1 to 5000, but the model has 260 tokens"),
    (prunes_tokens(labels=TOKENS[0] + 999), "data: labels from"),
    (prunes_tokens(labels=torch.ones(32).bool()), "data: labels, torch.bool [32]: must be integers, [T] or [B, T]"),
    (prunes_tokens(labels=torch.rand(32)), "data: labels, torch.float32 [32]: must be integers, [T] or [B, T]"),
    (prunes_tokens(attention_mask=torch.ones(3).int()), "attention_mask is [1, 3], input_ids are [1, 32]"),
    (prunes_tokens(attention_mask=torch.full((32,), -1e9)), "attention_mask, torch.float32 [32]: must be 0 or 1, [T]"),
    *(
        (prunes_tokens(position_ids=ids), "position_ids: the tokens of each sample are counted from 0; leave them out")
        for ids in (torch.arange(16).repeat(2), torch.arange(31))  # of packed samples, of fewer tokens
    ),
    (prunes(["a <8> b" * 9], tokenizer=enlarged, **FEW), "the calibration text has token ids from"),
    (measures(["a <8> b" * 9], tokenizer=enlarged, seq_len=16), "the evaluation text has token ids from"),
    # models
    (prunes_without_data(lambda m: "gpt2"), "model: str is not a causal language model"),
    (prunes_without_data(lambda m: torch.nn.Linear(4, 4)), "model: Linear is not a causal language model"),
    (prunes_without_data(without_layers), "no layer to prune: the decoder blocks have no nn.Linear"),
    (prunes_without_data(with_adapter), "model: has adapters of peft"),
    (prunes_without_data(offloaded), "model: has weights that are offloaded"),
    (prunes_without_data(packed), "give the dense model (to unpack a packed one: proxsparse.inference.convert.unspars"),
    (prunes(TEXTS, model=with_tuples), "model: returns tuples"),
    (measures(TEXTS, with_tuples), "set return_dict = True in model.config"),
    (tunes(lambda m: with_tuples(tiny_model("llama"))), "set return_dict = True in teacher.config"),
    (tunes(lambda m: "gpt2"), "teacher: str is not a causal language model of transformers"),
    (tunes(distill=0.5), "teacher=None: distill=0.5 needs the dense model"),
    (tunes(other(vocab_size=300)), "teacher: its vocabulary has 300 tokens, that of the model 260"),
    (tunes(copy.copy), "teacher: shares weights with the model, which change; load the dense model again"),
    (tunes_dense(), "model: no layer is pruned; prune it first, or give its pattern"),
    (lambda m, t: proxsparse.sparsify_("gpt2"), "model='gpt2': not a model"),
    (learns(torch.nn.Linear(4, 4)), "model: Linear is not a language model of transformers"),
    (
        torch.inference_mode()(prunes(TEXTS, method="proxsparse")),
        "model: cannot be changed in torch.inference_mode(); load it, and call",
    ),
    (
        lambda m, t: proxsparse.perplexity(m.compile() or m, t, TEXTS),
        "model: has modules that are compiled; call this function first",
    ),
    (lambda m, t: proxsparse.sparsify_(m.model.norm.compile() or m), "model: has modules that are compiled"),
    (prunes(TEXTS, model=torch.nn.DataParallel), "model: DataParallel wraps the model; give model.module"),
    (measures(TEXTS, torch.nn.DataParallel), "model: DataParallel wraps the model; give model.module"),
    (tunes(torch.nn.DataParallel), "teacher: DataParallel wraps the model; give teacher.module"),
    (lambda m, t: proxsparse.sparsify_(torch.nn.DataParallel(m)), "model: DataParallel wraps the model"),
    (lambda m, t: proxsparse.sparsify_(with_adapter(m)), "model: has adapters of peft; pack the model before they"),
    # masks
    (masks({"a": HALF}, lambda m: "gpt2"), "model='gpt2': not a model; load it with AutoModelForCausalLM"),
    (masks({"a": HALF}, torch.nn.DataParallel), "model: DataParallel wraps the model; give model.module"),
    (masks({"a": HALF}, with_adapter), "give model.merge_and_unload"),
    (masks({"a": HALF}, offloaded), "model: has weights that are offloaded"),
    (masks("m.safetensors"), "masks='m.safetensors': not a dict, layer name -> mask; give the masks of prune_ or load"),
    (
        masks({"lm_head": ALL}, other(tie_word_embeddings=True)),
        "masks: the weight of lm_head is also that of model.embed_tokens; leave its mask out",
    ),
    (masks({UP_PROJ: torch.zeros(2, 2).byte()}), f"masks: layer {UP_PROJ} has torch.uint8 [2, 2]; give torch.bool ["),
    (saves([TOKENS[0]]), "]: not a dict, layer name -> mask"),
    (saves({}), "masks={}: no layer"),
    (saves({"a": HALF.to_sparse()}), "masks: layer a has torch.bool [1, 8] torch.sparse_coo on cpu; give torch.bool"),
    (saves({"a": HALF.to("meta")}), "masks: layer a has torch.bool [1, 8] torch.strided on meta; give torch.bool"),
    (saves({"a": HALF[0]}, "2:4"), "masks: layer a has torch.bool [8]; give torch.bool ["),
    (saves({"a": HALF.numpy()}, "2:4"), "masks: layer a has ndarray; give torch.bool ["),
    (saves({"a": ALL}), "masks: layer a does not keep n:m in all blocks, for any n:m; leave it out"),
    (saves({"a": HALF}, {"b": "2:4"}), "pattern: none of layer a; add it"),
    (saves({"a": HALF}, {"a": None}), "pattern: none of layer a; add it"),
    (saves({"a": TOKENS[0]}, file="none/m"), "there is no directory none"),
    (saves({"a": HALF}, file="."), ".: a directory; give the name of a file in it"),
    (lambda m, t: proxsparse.save_masks({"a": HALF}, "m.safetensors"), "path={'a': tensor"),
    (lambda m, t: proxsparse.load_masks(None), "path=None: not a path; give a str or a pathlib"),
    # options
    (prunes(TEXTS, method="wandb"), "method 'wandb': no such method; choose from"),
    (prunes(TEXTS, method="sparsegpt", dampng=1), "method 'sparsegpt' has no option 'dampng'; its options: damping"),
    (prunes(TEXTS, method="sparsegpt", damping="0.1"), "damping='0.1': must be of type"),
    (prunes(TEXTS, num_samples="8"), "num_samples='8': must be of type"),
    (tunes_dense(learning_rate=True), "learning_rate=True: must be of type"),
    (prunes(TEXTS, seed=-1), "seed -1: must be between 0 and"),
    (prunes(TEXTS, checkpoints=5), "checkpoints=5: not a path"),
    (tunes_dense(checkpoints=5), "checkpoints=5: not a path"),
    (
        prunes(TEXTS, method="proxsparse", gradient_accumulation_steps=99),
        "gradient_accumulation_steps 99: a step on 1 processes needs 99 batches",
    ),
    (measures(TEXTS, seq_len=1), "seq_len 1: must be at least 2"),
    (prunes_without_data(include="mlp"), "include='mlp': must be a list of regular expressions"),
    (prunes_without_data(exclude=["mlp", 5]), "exclude=['mlp', 5]: must be a list of regular"),
    (tunes_dense(include=5), "include=5: must be a list of regular expressions"),
    (prunes_without_data(pattern="2:3"), "multiple of 3 for 2:3 blocks"),
    (prunes_without_data(pattern="3:2"), "pattern: pattern 3:2"),
    (prunes_without_data(pattern=None), "pattern: pattern None"),
    (prunes_without_data(pattern={"lm_head": "2:4"}), "layer lm_head: no such nn.Linear to prune"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=[message[:40] for _, message in REFUSALS])
def test_refusals_name_the_argument_and_leave_the_model(call, message):
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    before = copy_weights(model)
    with pytest.raises(InputError) as raised:
        call(model, tokenizer)
    assert message in str(raised.value)
    assert "--" not in str(raised.value)
    after = copy_weights(model)
    assert "teacher" in message or all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_process_group_is_refused(monkeypatch):
    monkeypatch.setattr("proxsparse.pruning.world_size", lambda: 2)
    with pytest.raises(InputError, match="runs in one process, not in a process group of 2"):
        proxsparse.prune_(tiny_model("llama"), "magnitude")


@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_every_forward_pass_computes_is_refused_by_name(call, kind):
    model = prune_by_magnitude(tiny_model("llama"))
    for block in model.model.layers:
        COMPUTED[kind](block.mlp.up_proj)
        block.mlp.up_proj(torch.ones(1, 32))
    with pytest.raises(InputError, match=rf"^{UP_PROJ}: .*remove_parametrizations or torch.nn.utils.prune.remove"):
        CALLS[call](model, byte_tokenizer())
    if call == "prune_":
        with pytest.raises(InputError, match=r"^model.layers.1.mlp.up_proj: "):
            proxsparse.prune_(model, "magnitude", exclude=[r"layers\.0"])
        assert len(proxsparse.prune_(model, "magnitude", exclude=["up_proj"])) == 12


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("--seq_len 1: lower --eval_seq_len", "seq_len 1: lower seq_len"),
        ("use --precision fp32", "use model.float()"),
        ("the disk of --output_dir 'a'", "the disk of checkpoints 'a'"),
    ],
)
def test_errors_name_arguments_that_exist(flags, arguments):
    with pytest.raises(InputError) as raised, front_door(tiny_model("llama")):
        raise InputError(flags)
    assert str(raised.value) == arguments
