"""The teacher of `proxsparse finetune`: the dense model whose predictions the pruned model learns."""

from torch import nn

from proxsparse.errors import InputError
from proxsparse.io.checkpoints import digest_of
from proxsparse.models.layers import decoder_blocks
from proxsparse.models.loading import base_identity, load_model
from proxsparse.runtime.distributed import on_rank_zero
from proxsparse.runtime.sharding import shard_and_move_

GIVE = "give the dense model that was pruned"


def load_teacher(
    name: str, model: nn.Module, tokenizer, base: dict[str, str], within_node: bool
) -> tuple[nn.Module, dict[str, str]]:
    """The teacher of the model, on its device, sharded like it; and its `identity_of`.

    Args:
        base: what masks.safetensors records of the teacher, see `models.loading.base_identity`; {}: --teacher is given.
    Raises:
        InputError: it cannot be loaded, has other tokens, or is not the recorded model.
    """
    try:
        teacher, tokenizer_of_teacher = load_model(name)
    except InputError as error:
        source = "; masks.safetensors names this model, to use another one, give --teacher" if base else ""
        raise InputError(f"--teacher: {error}{source}") from error
    refuse_other_vocabulary(model, teacher, f"--teacher {name}")
    refuse_other_tokens(tokenizer, tokenizer_of_teacher, f"--teacher {name}")
    if then := base.get("base_weights_sha256"):
        now = on_rank_zero(lambda: base_identity(name, teacher))["base_weights_sha256"]
        if now != then:
            raise InputError(
                f"--teacher is missing: masks.safetensors names {name!r}, whose weights are not those that were pruned "
                f"(sha256 {now:.12}, recorded {then:.12}); give the dense model with --teacher"
            )
    weight, identity = next(model.parameters()), identity_of(teacher)
    shard_and_move_(teacher, decoder_blocks(teacher), weight.device, weight.dtype, "disk", within_node)
    return teacher, identity


def identity_of(teacher: nn.Module) -> dict[str, str]:
    """What the checkpoints of a training record of its teacher: a resumed run must have the same."""
    return {"a teacher with the digest": digest_of(teacher, ())[:16]}


def refuse_other_vocabulary(model: nn.Module, teacher: nn.Module, what: str) -> None:
    """Raises InputError, which begins with `what`, if the embeddings of the two have different numbers of tokens."""
    own, others = (len(each.get_input_embeddings().weight) for each in (model, teacher))
    if own != others:
        raise InputError(f"{what}: its vocabulary has {others:,} tokens, that of the model {own:,}; {GIVE}")


def refuse_other_tokens(tokenizer, of_teacher, what: str) -> None:
    """Raises InputError, which begins with `what`, if a token id has different texts in the tokenizers of the two.

    An id that only one of them has is accepted, such as that of an added padding token.
    """
    own, others = ({i: text for text, i in tokens.get_vocab().items()} for tokens in (tokenizer, of_teacher))
    different = [i for i in sorted(own.keys() & others.keys()) if own[i] != others[i]]
    if different:
        i = different[0]
        raise InputError(
            f"{what}: its tokens are not those of {tokenizer.name_or_path}: {len(different):,} token ids differ, such "
            f"as {i}: {others[i]!r} in the teacher, {own[i]!r} in the model; {GIVE}"
        )
