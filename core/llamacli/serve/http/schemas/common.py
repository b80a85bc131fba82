"""Fields that several endpoints share: sampling, limits, formats."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from llamacli.serve.errors import required
from llamacli.serve.http.schemas.foreign import GENERATION, Foreign, Refused, Schema
from llamacli.util.sampling_params import MAX_NUMBER, PARAMETERS, Parameter

MAX_CHOICES, MAX_STOPS, MAX_BIASES, MAX_TOP_LOGPROBS, MAX_TOOLS = 16, 16, 1024, 20, 128
MAX_ADAPTERS, MAX_SLOTS = 256, 256
MAX_ALLOWED, MAX_BAD_WORDS, MAX_ENDS = 1 << 20, 64, 256
MAX_NAME = 128
"""Characters of a sampler's name or a sequence breaker: breakers are tokenized before the request is in its queue."""

MAX_SCHEMA = 1 << 20
"""Size limit of a grammar or JSON Schema in bytes."""

MAX_SEED = (1 << 63) - 1

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Limit = Annotated[int, Meta(ge=-1, le=1 << 31)]
"""Number of tokens; -1 is no limit."""

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Positive = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
Text = Annotated[str, Meta(min_length=1)]
Names = Annotated[list[Annotated[str, Meta(max_length=MAX_NAME)]], Meta(max_length=64)]
Word = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Bias = bool | Annotated[float, Meta(ge=-100, le=100)]
"""Number to add to a logit; false forbids the token."""


class SchemaFormat(Schema, kw_only=True):
    """JSON Schema of a reply, with its name; `schema` is required."""

    schema: Any
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Schema, kw_only=True):
    """Format of a reply: `text`, `json_object` or `json_schema`; `schema` is llama.cpp's extension."""

    type: str
    json_schema: SchemaFormat | None = None
    schema: Any = None


class FlatFormat(Schema, kw_only=True):
    """Format of a reply with its JSON Schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Any = None

    def as_response_format(self, path: str) -> ResponseFormat:
        """The same for a chat request. Raises BadRequestError."""
        if self.type == "json_schema":
            required(self.schema, f"{path}.schema")
        return ResponseFormat(type=self.type, schema=self.schema)


class StreamOptions(Schema, kw_only=True):
    """Options of streams."""

    foreign: ClassVar[Foreign] = {
        "include_obfuscation": "chunks are not padded",
        "continuous_usage_stats": Refused("usage comes at the end; timings_per_token has timings"),
    }

    include_usage: bool | None = None


Budget = Annotated[int, Meta(ge=-1, le=1 << 31, description=PARAMETERS["reasoning_budget"].help)]


def sampling_struct(*names: str) -> Any:
    """Base class of schemas with these numeric sampling parameters."""

    def kind(one: Parameter) -> Any:
        top = 1 << 31 if one.high is None else one.high
        return Annotated[int if one.is_integer else float, Meta(ge=one.low, le=top, description=one.help)] | None

    return msgspec.defstruct("_Sampling", [(name, kind(PARAMETERS[name]), None) for name in names], kw_only=True)


class Sampling(sampling_struct(*PARAMETERS), Schema, kw_only=True):  # type: ignore[misc]
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
    logit_bias: (
        Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)]
        | Annotated[list[tuple[int | str, Bias]], Meta(max_length=MAX_BIASES)]
        | None
    ) = None


SAMPLING_FIELDS = {
    "repetition_penalty": "repeat_penalty",
    **dict.fromkeys(
        ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"),
        "reasoning_budget",
    ),
    **{
        field: field
        for field in (
            *(*PARAMETERS, "reasoning_budget_message", "samplers", "dry_sequence_breakers"),
            *("allowed_token_ids", "bad_words"),
        )
    },
}
"""Fields of SamplingParams by the names of the API."""


class LoraScale(Schema, kw_only=True):
    """Scale of a LoRA adapter, by its number in `/lora-adapters`."""

    id: Annotated[int, Meta(ge=0, le=1 << 31)]
    scale: Number


Lora = Annotated[list[LoraScale], Meta(max_length=MAX_ADAPTERS)]


class StructuredOutputs(Schema, kw_only=True):
    """Constraint of a text, one of vLLM's kinds."""

    foreign: ClassVar[Foreign] = {
        "structural_tag": Refused("tool calls have grammars of their own"),
        "whitespace_pattern": Refused("white space is limited"),
        "disable_any_whitespace": Refused("white space is limited"),
        "disable_additional_properties": "objects that list properties take no others",
        "disable_fallback": "there is one backend",
    }

    json: Any = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


class Generation(Sampling, kw_only=True):
    """Parameters of generated texts that all endpoints share.

    - `n_cmpl`, `n_predict`: llama.cpp's names of `n` and `max_tokens`. `n_probs`: log-probabilities, as `logprobs`.
    - `structured_outputs`, `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`: vLLM's names of a JSON
      Schema, a regular expression, texts to choose from and a grammar; at most one, or one of the fields above.
    - `allowed_token_ids`, `bad_words`: tokens that alone may come, and texts that may not.
    - `stop_token_ids`: tokens that end the text.
    - `include_stop_str_in_output`: the text ends with the stop string.
    - `skip_special_tokens`: false spells them in the text.
    - `truncate_prompt_tokens`: only the last tokens of the prompt are read; -1: as many as the context holds.
    - `id_slot`: number under which `/slots` saves and erases the text; -1 is none.
    - `t_max_predict_ms`: time after the prompt from which a text with a newline ends.
    - `verbose`: the reply has `__verbose`, with the prompt as the model reads it and all parameters.
    """

    foreign: ClassVar[Foreign] = GENERATION

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    n_cmpl: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    n_predict: Limit | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    json_schema: Any = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[Word], Meta(max_length=MAX_BAD_WORDS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ENDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Limit | None = None
    t_max_predict_ms: Annotated[float, Meta(ge=-1, le=MAX_NUMBER * 1000)] | None = None
    id_slot: Annotated[int, Meta(ge=-1, lt=MAX_SLOTS)] | None = None
    ignore_eos: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    verbose: bool | None = None
    draft_max: Annotated[int, Meta(ge=0, le=256)] | None = msgspec.field(default=None, name="speculative.n_max")
    lora: Lora | None = None
