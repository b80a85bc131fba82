"""Fields that several endpoints share: sampling, limits, formats."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from llamacli.util.sampling_params import MAX_NUMBER, PARAMETERS, Parameter

MAX_CHOICES, MAX_STOPS, MAX_BIASES, MAX_TOP_LOGPROBS, MAX_TOOLS = 16, 16, 1024, 20, 128
MAX_ADAPTERS = 256
MAX_NAME = 128
"""Characters of a sampler's name or a sequence breaker: breakers are tokenized before the request is in its queue."""

MAX_SCHEMA = 1 << 20
"""Size limit of a grammar or JSON Schema in bytes."""

MAX_SEED = (1 << 63) - 1

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
CountOrZero = Annotated[int, Meta(ge=0, le=1 << 31)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Positive = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
Text = Annotated[str, Meta(min_length=1)]
Names = Annotated[list[Annotated[str, Meta(max_length=MAX_NAME)]], Meta(max_length=64)]


class SchemaFormat(msgspec.Struct, kw_only=True):
    """JSON Schema of a reply, with its name; `schema` is required."""

    schema: Any
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Format of a reply: `text`, `json_object` or `json_schema`; `schema` is llama.cpp's extension."""

    type: str
    json_schema: SchemaFormat | None = None
    schema: Any = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of streams."""

    include_usage: bool | None = None


Budget = Annotated[int, Meta(ge=-1, le=1 << 31, description=PARAMETERS["reasoning_budget"].help)]


def sampling_struct(*names: str) -> Any:
    """Base class of schemas with these numeric sampling parameters."""

    def kind(one: Parameter) -> Any:
        top = 1 << 31 if one.high is None else one.high
        return Annotated[int if one.is_integer else float, Meta(ge=one.low, le=top, description=one.help)] | None

    return msgspec.defstruct("_Sampling", [(name, kind(PARAMETERS[name]), None) for name in names], kw_only=True)


class Sampling(sampling_struct(*PARAMETERS), msgspec.Struct, kw_only=True):  # type: ignore[misc]
    """Sampling parameters; an absent one is the model file's, else llama.cpp's."""

    repetition_penalty: Positive | None = None
    reasoning_budget_tokens: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    reasoning_budget_message: str | None = None
    dry_sequence_breakers: Names | None = None
    samplers: Names | None = None
    seed: Annotated[int, Meta(ge=-1, le=MAX_SEED)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None = None


SAMPLING_FIELDS = {
    "repetition_penalty": "repeat_penalty",
    **dict.fromkeys(
        ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"),
        "reasoning_budget",
    ),
    **{field: field for field in (*PARAMETERS, "reasoning_budget_message", "samplers", "dry_sequence_breakers")},
}
"""Fields of SamplingParams by the names of the API."""


class LoraScale(msgspec.Struct, kw_only=True):
    """Scale of a LoRA adapter, by its number in `/lora-adapters`."""

    id: Annotated[int, Meta(ge=0, le=1 << 31)]
    scale: Number


Lora = Annotated[list[LoraScale], Meta(max_length=MAX_ADAPTERS)]


class Generation(Sampling, kw_only=True):
    """Parameters of generated texts that the endpoints of OpenAI's API share."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    json_schema: Any = None
    grammar: str | None = None
    ignore_eos: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    draft_max: Annotated[int, Meta(ge=0, le=256)] | None = msgspec.field(default=None, name="speculative.n_max")
    lora: Lora | None = None
