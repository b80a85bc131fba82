"""Fields that several endpoints share: sampling, limits, formats."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from llamacli.util.sampling_defaults import DEFAULTS, MAX_NUMBER

MAX_CHOICES, MAX_STOPS, MAX_BIASES, MAX_TOP_LOGPROBS, MAX_TOOLS = 16, 16, 1024, 20, 128
MAX_ADAPTERS = 256
MAX_NAME = 128
"""Characters of a sampler's name or a sequence breaker: breakers are tokenized before the request is in its queue."""

MAX_SCHEMA = 1 << 20
"""Size limit of a grammar or JSON Schema in bytes."""

MAX_SEED = (1 << 63) - 1

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
CountOrZero = Annotated[int, Meta(ge=0, le=1 << 31)]
CountOrAll = Annotated[int, Meta(ge=-1, le=1 << 31)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Positive = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
Share = Annotated[float, Meta(ge=0, le=1)]
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


class Sampling(msgspec.Struct, kw_only=True):
    """Sampling parameters; those absent are the model file's, else llama.cpp's."""

    temperature: Positive | None = None
    dynatemp_range: Positive | None = None
    dynatemp_exponent: Positive | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    top_n_sigma: Number | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    repeat_penalty: Positive | None = None
    repetition_penalty: Positive | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repeat_last_n: CountOrAll | None = None
    dry_multiplier: Positive | None = None
    dry_base: Annotated[float, Meta(ge=1, le=MAX_NUMBER)] | None = None
    dry_allowed_length: CountOrZero | None = None
    dry_penalty_last_n: CountOrAll | None = None
    dry_sequence_breakers: Names | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    mirostat_tau: Positive | None = None
    mirostat_eta: Positive | None = None
    adaptive_target: Annotated[float, Meta(ge=-1, le=1)] | None = None
    adaptive_decay: Annotated[float, Meta(ge=0, le=0.99)] | None = None
    samplers: Names | None = None
    seed: Annotated[int, Meta(ge=-1, le=MAX_SEED)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None = None


SAMPLING_FIELDS = {
    "repetition_penalty": "repeat_penalty",
    **{field: field for field in DEFAULTS if field in Sampling.__struct_fields__},
    "samplers": "samplers",
    "dry_sequence_breakers": "dry_sequence_breakers",
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
