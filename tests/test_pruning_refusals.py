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


def offloaded(model):
    with torch.device("meta"):
        return type(model)(model.config)


def without_layers(model):
    for block in model.model.layers:
        block.self_attn = block.mlp = torch.nn.Identity()
    return model


def prunes(method, *data, tokenizer=True, **options):
    """A call of prune_ with the model of the test, and with its tokenizer unless tokenizer=False."""
    return lambda m, t: proxsparse.prune_(m, method, *data, tokenizer=t if tokenizer else None, **options)


def tunes(teacher=lambda m: None, **options):
    """A call of finetune_ with the model of the test, pruned."""
    return lambda m, t: proxsparse.finetune_(prune_by_magnitude(m), teacher(m), TEXTS, t, **options)


def saves(masks, pattern=None, file="none"):
    return lambda m, t: proxsparse.save_masks(file, masks, pattern)


def learns(model):
    return lambda m, t: proxsparse.ProxOptimizer(torch.optim.SGD(m.parameters()), reg_lambda=0.1, model=model)


HALF = (torch.arange(8) % 4 < 2)[None]


def splits(*names):
    datasets = pytest.importorskip("datasets")
    return datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": ["b"]}) for name in names})


@torch.inference_mode()
def in_inference_mode(model, tokenizer):
    proxsparse.prune_(model, "proxsparse", TEXTS, tokenizer)


REFUSALS = {
    "no data": (prunes("proxsparse"), "data=None: method 'proxsparse' needs calibration text"),
    "no form": (prunes("wanda", 5), "data=5: give the name of a source"),
    "no directory": (saves({"a": TOKENS[0]}, file="none/m"), "there is no directory none"),
    "empty": (prunes("wanda", []), "data: it is empty"),
    "no tokenizer": (prunes("wanda", TEXTS, tokenizer=False), "tokenizer=None: texts need the tokenizer"),
    "mixed": (prunes("wanda", ["a", 1]), "data: 1 is not text"),
    "no file": (prunes("wanda", "none.txt"), "'none.txt': no such file"),
    "no input_ids": (prunes("wanda", [{"ids": 1}], tokenizer=False), "a dict with ids, without input_ids"),
    "floats": (
        prunes("wanda", [torch.rand(3)], tokenizer=False),
        "data: input_ids, torch.float32 [3]: must be integers",
    ),
    "mask": (
        prunes("wanda", [{"input_ids": TOKENS[0], "attention_mask": torch.ones(3).int()}], tokenizer=False),
        "attention_mask is [1, 3], input_ids are [1, 32]",
    ),
    **{
        f"{value} as {name}": (
            prunes("wanda", [{"input_ids": TOKENS[0], name: torch.full((32,), value)}], tokenizer=False),
            f"data: {name}, {message}, [T] or [B, T]",
        )
        for name, value, message in (
            ("attention_mask", -1e9, "torch.float32 [32]: must be 0 or 1"),
            ("attention_mask", 2, "torch.int64 [32]: must be 0 or 1"),
            ("labels", 0.5, "torch.float32 [32]: must be integers"),
            ("labels", True, "torch.bool [32]: must be integers"),
        )
    },
    **{
        f"splits {names}": (
            lambda m, t, names=names: prunes("wanda", splits(*names))(m, t),
            f"data: a DatasetDict; give one of its splits, such as data['{shown}']",
        )
        for names, shown in ((["a"], "a"), ([], "train"))
    },
    "texts in a loader": (
        prunes("wanda", DataLoader([{"text": "a"}, {"text": "b"}], batch_size=2)),
        "data: a dict with text, without input_ids",
    ),
    "chat": (prunes("wanda", [{"text": [{"role": "user", "content": "a"}]}]), "'user'}] is not text; a row is"),
    **{
        f"positions of {what}": (
            prunes("wanda", [{"input_ids": torch.stack(TOKENS[:2]), "position_ids": positions}], tokenizer=False),
            "data: position_ids do not count the tokens of each sample from 0; leave them out",
        )
        for what, positions in {
            "packed samples": torch.arange(16).repeat(2, 2),
            "a cache": torch.arange(32) + 32,
            "fewer tokens": torch.arange(31),
            "more samples": torch.arange(32).repeat(3, 1),
        }.items()
    },
    "one token": (prunes("proxsparse", [torch.tensor([5])]), "data: no sample has a token to predict"),
    "long tokens": (
        prunes("wanda", [torch.ones(200).long()]),
        "data: a sample has 200 tokens, the model's context length is 128; give seq_len",
    ),
    "foreign tokens": (
        prunes("wanda", [torch.tensor([1, 5000])], tokenizer=False),
        "token ids from 1 to 5000, but the model has 260 tokens",
    ),
    "foreign labels": (
        prunes("wanda", [{"input_ids": TOKENS[0], "labels": TOKENS[0] + 999}], tokenizer=False),
        "data: labels from",
    ),
    "enlarged tokenizer": (
        lambda m, t: proxsparse.prune_(m, "wanda", ["a <8> b" * 9], enlarged(t), **FEW),
        "the calibration text has token ids from",
    ),
    "enlarged tokenizer, perplexity": (
        lambda m, t: proxsparse.perplexity(m, enlarged(t), ["a <8> b" * 9], seq_len=16),
        "the evaluation text has token ids from",
    ),
    "name of a tokenizer": (
        lambda m, t: proxsparse.prune_(m, "wanda", TEXTS, "gpt2"),
        "give AutoTokenizer.from_pretrained('gpt2')",
    ),
    "long text": (prunes("wanda", "word " * 99), "a text, not the name of a source; give a list of texts"),
    "none": (prunes("wanda", [None]), "data: an item of type NoneType"),
    "name of a teacher": (tunes(lambda m: "gpt2"), "teacher: str is not a causal language model of transformers"),
    "name of a model to mask": (
        lambda m, t: proxsparse.apply_masks_("gpt2", {"a": HALF}),
        "model='gpt2': not a model; load it with AutoModelForCausalLM",
    ),
    "name of a model to prune": (lambda m, t: proxsparse.prune_("gpt2"), "model: str is not a causal language model"),
    "name of a model to pack": (lambda m, t: proxsparse.sparsify_("gpt2"), "model='gpt2': not a model"),
    "name of a model to train": (learns("gpt2"), "model: str is not a language model of transformers"),
    "other model to train": (learns(torch.nn.Linear(4, 4)), "model: Linear is not a language model of transformers"),
    "file as masks": (
        lambda m, t: proxsparse.apply_masks_(m, "m.safetensors"),
        "masks='m.safetensors': not a dict, layer name -> mask; give the masks of prune_ or load_masks",
    ),
    "list as masks": (saves([TOKENS[0]]), "]: not a dict, layer name -> mask"),
    "masks before the file": (
        lambda m, t: proxsparse.save_masks({"a": HALF}, "m.safetensors"),
        "path={'a': tensor",
    ),
    "no file of masks": (lambda m, t: proxsparse.load_masks(None), "path=None: not a path; give a str or a pathlib"),
    "checkpoints": (prunes("wanda", TEXTS, checkpoints=5), "checkpoints=5: not a path"),
    "checkpoints of a training": (
        lambda m, t: proxsparse.finetune_(m, None, TEXTS, t, checkpoints=5),
        "checkpoints=5: not a path",
    ),
    "sparse masks": (
        saves({"a": HALF.to_sparse()}),
        "masks: layer a has torch.bool [1, 8] torch.sparse_coo; give torch.bool",
    ),
    "masks without data": (
        saves({"a": HALF.to("meta")}),
        "masks: layer a has torch.bool [1, 8] without data; give torch",
    ),
    "number of a mask": (saves({1: HALF}), "masks: 1 is not the name of a layer; give a str"),
    "masks for a wrapper": (
        lambda m, t: proxsparse.apply_masks_(torch.nn.DataParallel(m), {"a": HALF}),
        "model: DataParallel wraps the model; give model.module",
    ),
    "masks for adapters": (
        lambda m, t: proxsparse.apply_masks_(with_adapter(m), {"a": HALF}),
        "give model.merge_and_unload",
    ),
    "masks for an offloaded model": (
        lambda m, t: proxsparse.apply_masks_(offloaded(m), {"a": HALF}),
        "model: has weights that are offloaded",
    ),
    "mask of a tied layer": (
        lambda m, t: proxsparse.apply_masks_(
            tiny_model("llama", tie_word_embeddings=True), {"lm_head": torch.ones(260, 32).bool()}
        ),
        "masks: the weight of lm_head is also that of model.embed_tokens; leave its mask out",
    ),
    "bytes as masks": (
        lambda m, t: proxsparse.apply_masks_(m, {"model.layers.0.mlp.up_proj": torch.zeros(2, 2).byte()}),
        "masks: layer model.layers.0.mlp.up_proj has torch.uint8 [2, 2]; give torch.bool [",
    ),
    "masks of a vector": (
        saves({"a": torch.arange(8) % 4 < 2}, "2:4"),
        "masks: layer a has torch.bool [8]; give torch.bool [",
    ),
    "arrays as masks": (saves({"a": torch.ones(4, 4).numpy()}, "2:4"), "masks: layer a has ndarray; give torch.bool ["),
    "masks to a directory": (
        saves({"a": HALF}, file="."),
        ".: a directory; give the name of a file in it",
    ),
    "inference mode": (in_inference_mode, "model: cannot be changed in torch.inference_mode(); load it, and call"),
    "method": (prunes("wandb", TEXTS), "method 'wandb': no such method; choose from"),
    "option": (prunes("sparsegpt", TEXTS, dampng=1), "method 'sparsegpt' has no option 'dampng'; its options: damping"),
    "type": (prunes("sparsegpt", TEXTS, damping="0.1"), "damping='0.1': must be of type"),
    "expression": (prunes("magnitude", include="mlp"), "include='mlp': must be a list of regular expressions"),
    "expressions": (prunes("magnitude", exclude=["mlp", 5]), "exclude=['mlp', 5]: must be a list of regular"),
    "expression, finetune_": (
        lambda m, t: proxsparse.finetune_(m, None, TEXTS, t, include=5),
        "include=5: must be a list of regular expressions",
    ),
    "seed": (prunes("wanda", TEXTS, seed=-1), "seed -1: must be between 0 and"),
    "text": (prunes("wanda", TEXTS, num_samples="8"), "num_samples='8': must be of type"),
    "batches": (
        prunes("proxsparse", TEXTS, gradient_accumulation_steps=99),
        "gradient_accumulation_steps 99: a step on 1 processes needs 99 batches",
    ),
    "pattern": (prunes("magnitude", pattern="2:3"), "multiple of 3 for 2:3 blocks"),
    **{
        f"pattern {wrong}": (prunes("magnitude", pattern=wrong), f"pattern: pattern {shown}")
        for wrong, shown in (("abc", "'abc'"), ("3:2", "3:2"), (5, "5"), (None, "None"))
    },
    "unknown layer": (prunes("magnitude", pattern={"lm_head": "2:4"}), "layer lm_head: no such nn.Linear to prune"),
    "no layer": (lambda m, t: proxsparse.prune_(without_layers(tiny_model("llama"))), "no layer to prune: 0 nn.Linear"),
    "no model": (lambda m, t: proxsparse.prune_(torch.nn.Linear(4, 4)), "model: Linear is not a causal language model"),
    "tuples": (lambda m, t: proxsparse.prune_(with_tuples(m), "wanda", TEXTS, t), "model: returns tuples"),
    "tuples, perplexity": (
        lambda m, t: proxsparse.perplexity(with_tuples(m), t, TEXTS),
        "set return_dict = True in model.config",
    ),
    "tuples, teacher": (tunes(lambda m: with_tuples(tiny_model("llama"))), "set return_dict = True in teacher.config"),
    "adapters": (lambda m, t: proxsparse.prune_(with_adapter(m), "magnitude"), "model: has adapters of peft"),
    "offloaded": (lambda m, t: proxsparse.prune_(offloaded(m), "magnitude"), "model: has weights that are offloaded"),
    "packed": (
        lambda m, t: proxsparse.prune_(proxsparse.sparsify_(prune_by_magnitude(tiny_model("llama"))), "magnitude"),
        "give the dense model (to unpack a packed one: proxsparse.inference.convert.unsparsify_)",
    ),
    "dense": (
        lambda m, t: proxsparse.finetune_(m, None, TEXTS, t),
        "model: no layer is pruned; prune it first, or give its pattern",
    ),
    "no teacher": (tunes(distill=0.5), "teacher=None: distill=0.5 needs the dense model"),
    "teacher": (
        tunes(lambda m: tiny_model("llama", vocab_size=300)),
        "teacher: its vocabulary has 300 tokens, that of the model 260",
    ),
    "shared teacher": (
        tunes(copy.copy),
        "teacher: shares weights with the model, which change; load the dense model again",
    ),
    "perplexity": (lambda m, t: proxsparse.perplexity(m, t, TEXTS, seq_len=1), "seq_len 1: must be at least 2"),
    "no masks": (saves({}), "masks={}: no layer"),
    **{
        f"no pattern of a layer, {pattern}": (saves({"a": HALF}, pattern), "pattern: none of layer a; add it")
        for pattern in ({}, {"b": "2:4"}, {"a": None})
    },
    "masks": (
        saves({"a": torch.ones(1, 4, dtype=torch.bool)}),
        "masks: layer a does not keep n:m in all blocks, for any n:m; leave it out",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSALS.values(), ids=REFUSALS)
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
