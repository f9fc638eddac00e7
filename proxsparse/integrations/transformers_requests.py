"""The requests of the server: which values their fields may have."""

import inspect
import json
from typing import Annotated, Required

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict

# A client may set the variables of a chat template, and no arguments of the function, such as another template.
RESERVED = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"}
SHOWN = 60  # characters of a wrong value in a message


def refuse_arguments(variables: dict) -> dict:
    """The variables of a chat template. Raises ValueError for an argument of apply_chat_template."""
    if taken := RESERVED & set(variables):
        raise ValueError(f"{min(taken)} is not a variable of the chat template")
    return variables


Tokens = Annotated[int, Field(ge=1)]
Answers = Annotated[int, Field(ge=1, le=128)]
Stop = Annotated[str, Field(min_length=1)]  # an empty string would end each answer after one token
TokenNumber = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


class Message(TypedDict, total=False):
    """A message of a chat; its parts are read by transformers."""

    __pydantic_config__ = ConfigDict(extra="allow")
    role: Required[str]
    content: str | list | None
    tool_calls: list | None


class Fields(BaseModel, extra="allow", strict=True, allow_inf_nan=False):
    """The fields of a request, of all routes; transformers refuses the others. None is the same as no value."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None  # 0 means greedy
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-0.99, le=2)] | None = None  # a repetition penalty of 0.01 to 3
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None  # of torch
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None
    max_tool_calls: Tokens | None = None
    n: Answers | None = None
    best_of: Answers | None = None
    logprobs: bool | Annotated[int, Field(ge=0, le=20)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logit_bias: dict[TokenNumber, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: Stop | list[Stop] | None = None
    stream: bool | None = None
    parallel_tool_calls: bool | None = None
    prompt: str | None = None
    suffix: str | None = None
    instructions: str | None = None
    input: str | list | None = None
    messages: list[Message] | None = None
    tools: list[dict] | None = None
    generation_config: None = None  # the other fields have the settings of an answer
    chat_template_kwargs: Annotated[dict, AfterValidator(refuse_arguments)] | None = None


def checked(body: dict, vocabulary: int) -> dict:
    """The fields of a request, without those that are null. Raises ValueError, with the field, for a wrong value.

    vocabulary is the number of tokens of the model.
    """
    try:
        fields = {name: value for name, value in Fields.model_validate(body) if value is not None}
    except ValidationError as refused:
        error = min(refused.errors(), key=lambda each: each["type"].endswith("_type"))  # of the fitting type
        shown = json.dumps(error["input"])
        shown = f"{shown[:SHOWN]}{'...' * (len(shown) > SHOWN)}"
        field = ".".join(map(str, error["loc"])) if error["type"] == "missing" else error["loc"][0]
        raise ValueError(f"{field}: {error['msg']}, not {shown}") from refused
    for token in fields.get("logit_bias", {}):
        if int(token) >= vocabulary:
            raise ValueError(f"logit_bias: the model has {vocabulary} tokens, so none has the number {token}")
    return {"stream": False} | fields
