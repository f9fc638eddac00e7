"""The teacher of `proxsparse finetune`: the dense model whose predictions the pruned model learns."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from proxsparse.errors import InputError
from proxsparse.models.layers import decoder_blocks
from proxsparse.models.loading import load_model, load_tokenizer
from proxsparse.runtime.sharding import shard_and_move_


def load_teacher(name: str, model: nn.Module, within_node: bool) -> nn.Module:
    """The teacher of the model, on its device, sharded like it.

    Raises:
        InputError: it cannot be loaded, or has another vocabulary.
    """
    with named_teacher():
        teacher, _ = load_model(name)
    refuse_other_vocabulary(model, teacher, f"--teacher {name}")
    weight = next(model.parameters())
    shard_and_move_(teacher, decoder_blocks(teacher), weight.device, weight.dtype, "disk", within_node)
    return teacher


def refuse_other_vocabulary(model: nn.Module, teacher: nn.Module, what: str) -> None:
    """Raises InputError, which begins with `what`, if the embeddings of the two have different numbers of tokens."""
    sizes = [len(each.get_input_embeddings().weight) for each in (model, teacher)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"{what}: its vocabulary has {sizes[1]:,} tokens, that of the model {sizes[0]:,}; give the dense "
            "model that was pruned"
        )


def check_tokens(tokenizer, teacher: str) -> None:
    """Raises InputError if a token id has different texts in the tokenizers of the model and of the teacher.

    An id that only one of the two has is accepted, such as that of an added padding token.
    """
    with named_teacher():
        other = load_tokenizer(teacher)
    own, others = ({i: text for text, i in tokens.get_vocab().items()} for tokens in (tokenizer, other))
    different = [i for i in sorted(own.keys() & others.keys()) if own[i] != others[i]]
    if different:
        i = different[0]
        raise InputError(
            f"--teacher {teacher}: its tokens are not those of {tokenizer.name_or_path}: {len(different):,} token ids "
            f"differ, such as {i}: {others[i]!r} in the teacher, {own[i]!r} in the model; give the dense model that "
            "was pruned"
        )


@contextmanager
def named_teacher() -> Iterator[None]:
    """Within the block an InputError gets the name of the flag."""
    try:
        yield
    except InputError as error:
        raise InputError(f"--teacher: {error}") from error
