"""The requests of the server: which values their fields may have."""

import inspect
import json
import math
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

# A client may set the variables of a chat template, and no arguments of the function, such as another template.
RESERVED = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"}
SHOWN = 60  # characters of a wrong value in a message


def is_number(value, low: float, high: float, kind=int | float) -> bool:
    """Whether the value of a field is a number, but not true, false or NaN, and in the range."""
    return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high


# Each of these two returns the test of a field, and the words for what passes it.


def number(low: float, high: float) -> tuple[Callable, str]:
    return lambda value: is_number(value, low, high), f"a number from {low:g} to {high:g}"


def integer(low: int, high: int) -> tuple[Callable, str]:
    return lambda value: is_number(value, low, high, int), f"an integer from {low} to {high}"


def each(values, holds: Callable) -> bool:
    """Whether this is a list with such values."""
    return isinstance(values, list) and all(map(holds, values))


def is_stop(value) -> bool:
    """Whether the value can end an answer. An empty string would end each after one token."""
    return isinstance(value, str) and value != ""


def is_message(value) -> bool:
    """Whether the value is a message of a chat; its parts are read by transformers."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str | list | None)
        and isinstance(value.get("tool_calls"), list | None)
    )


TOKENS = (lambda v: is_number(v, 1, math.inf, int), "an integer, at least 1")
SWITCH = (lambda v: isinstance(v, bool), "true or false")
STRING = (lambda v: isinstance(v, str), "a string")
FIELDS = {  # name -> whether a value is right, and what it must be. null is the same as no value
    # 0 means greedy. The scores are divided by it, in fp32
    "temperature": (lambda v: v == 0 or is_number(v, 1e-6, 100), "0, or a number from 1e-06 to 100"),
    "top_p": number(0, 1),
    "frequency_penalty": number(-0.99, 2),  # a repetition penalty of 0.01 to 3
    "presence_penalty": number(-2, 2),
    "seed": integer(-(2**63), 2**64 - 1),  # of torch
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tool_calls"), TOKENS),
    **dict.fromkeys(("n", "best_of"), integer(1, 128)),
    "logprobs": (lambda v: isinstance(v, bool) or is_number(v, 0, 20, int), "true, false or an integer from 0 to 20"),
    "top_logprobs": integer(0, 20),
    "stop": (lambda v: is_stop(v) or each(v, is_stop), "a string or a list of strings, none of them empty"),
    **dict.fromkeys(("stream", "parallel_tool_calls"), SWITCH),
    **dict.fromkeys(("prompt", "suffix", "instructions"), STRING),
    "input": (lambda v: isinstance(v, str | list), "a string or a list"),
    "messages": (lambda v: each(v, is_message), "a list of objects with a role and a content"),
    "tools": (lambda v: each(v, lambda tool: isinstance(tool, dict)), "a list of objects"),
    "generation_config": (lambda _v: False, "left out; the other fields have the settings of an answer"),
    "chat_template_kwargs": (
        lambda v: isinstance(v, dict) and not RESERVED & set(v),
        "an object with variables of the chat template, and no arguments of apply_chat_template",
    ),
}


def checked(body: dict, vocabulary: int) -> dict:
    """The fields of a request, without those that are null. Raises ValueError, with the field, for a wrong value.

    vocabulary is the number of tokens of the model.
    """

    def is_bias(value) -> bool:
        return isinstance(value, dict) and all(
            key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocabulary and is_number(bias, -100, 100)
            for key, bias in value.items()
        )

    words = f"an object of token numbers below {vocabulary} and numbers from -100 to 100"
    fields = FIELDS | {"logit_bias": (is_bias, words)}
    body = {"stream": False} | {name: value for name, value in body.items() if value is not None}
    for name in body.keys() & fields.keys():
        holds, words = fields[name]
        if not holds(body[name]):
            shown = json.dumps(body[name])
            raise ValueError(f"{name} must be {words}, not {shown[:SHOWN]}{'...' * (len(shown) > SHOWN)}")
    if "logit_bias" in body:
        body["logit_bias"] = {token: float(bias) for token, bias in body["logit_bias"].items()}
    return body
