"""Tiny models with attention heads of a size that vLLM supports on CPUs, and what transformers generates with them."""

from functools import partial

import torch
from pruned import prune_
from tiny_models import byte_tokenizer, tiny_model

from proxsparse.pack import main as pack

SIZE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], list(range(30, 50)), [40]]
NEW_TOKENS = 16


def save_packed(folder, name="llama", but=("lm_head",), flags=(), pattern="2:4"):
    """A tiny model in float32 that is pruned except `but`: its dense and its packed folder."""
    model = prune_(tiny_model(name, **SIZE), but, pattern)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.1)  # they are 0
    model.save_pretrained(folder / "dense")
    byte_tokenizer().save_pretrained(folder / "dense")
    assert pack([str(folder / "dense"), "--output_dir", str(folder / "packed"), *flags]) == 0
    return folder / "dense", folder / "packed"


@torch.no_grad()
def generated_by_transformers(folder) -> list[list[int]]:
    """The tokens that follow each of PROMPTS, one prompt at a time, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    generate = partial(model.generate, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [generate(torch.tensor([ids]))[0, len(ids) :].tolist() for ids in PROMPTS]


@torch.no_grad()
def log_probabilities(folder, ids: list[int]) -> list[float]:
    """The log probability of each token after the first, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(log_p[place, token]) for place, token in enumerate(ids[1:])]
