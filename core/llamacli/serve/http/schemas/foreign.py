"""Fields of requests that are refused, or have no effect.

A schema has them in `foreign`, by name: a `Refused`, or the reason why the field has no effect on the response.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import msgspec

from llamacli.serve.errors import BadRequestError


class Refused(NamedTuple):
    """Reason why a field is refused.

    Values in `neutral` are accepted, and null; without `neutral`, empty and false values and 0. `details` are further
    fields of the error object.
    """

    reason: str
    neutral: tuple[Any, ...] = ()
    details: Mapping[str, Any] = MappingProxyType({})

    def refuses(self, value: Any) -> bool:
        """True for a value that would change the reply."""
        return value not in (*self.neutral, None) if self.neutral else bool(value)


Foreign = Mapping[str, Refused | str]


class Schema(msgspec.Struct, kw_only=True):
    """Base class of schemas: its fields are honoured, `foreign` has others."""

    foreign: ClassVar[Foreign] = {}


TEXT_ONLY = Refused("models read text only")
_STORED = "only responses are stored"
CACHED = "prefixes are cached in any case; texts do not depend on it"
_SHIFT = "prompts are never shifted or cut"
_CHAIN = "the samplers do not have it"

OPENAI: Foreign = {
    **dict.fromkeys(("user", "safety_identifier"), "clients are told apart by API key"),
    **dict.fromkeys(("metadata", "store"), _STORED),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), CACHED),
    "prediction": "it is for chats; texts do not depend on drafts",
    "service_tier": "there is one",
    "moderation": Refused("texts are not moderated"),
}

_PEER: Foreign = {
    **dict.fromkeys(("n_keep", "n_discard"), _SHIFT),
    **dict.fromkeys(("n_cache_reuse", "cache_prompt"), CACHED),
    "t_max_prompt_ms": "llama-server does not honour it either",
    "sse_ping_interval": "comments come after 15 seconds of silence",
    "backend_sampling": "where samplers run does not change texts",
    **dict.fromkeys(("speculative.n_min", "speculative.p_min", "speculative.type", "speculative.ngram_size_n",
                     "speculative.ngram_size_m", "speculative.ngram_min_hits"), "drafts do not change texts"),
    "min_keep": Refused(_CHAIN),
    "n_indent": Refused("give it to /completion"),
    "post_sampling_probs": Refused("give it to /completion"),
    "response_fields": Refused("give it to /completion"),
    "return_tokens": Refused("give return_token_ids to /v1/completions, or return_tokens to /completion"),
    "image_data": TEXT_ONLY,
    "multimodal_data": TEXT_ONLY,
    **dict.fromkeys(("grammar_lazy", "grammar_triggers", "preserved_tokens", "chat_format", "chat_parser"),
                    Refused("grammars of tool calls are made by the server")),
    "reasoning_format": "it is for chats",
    "add_generation_prompt": "it is for chats, whose template writes it",
    **dict.fromkeys(("reasoning_control", "continue_final_message", "documents", "tools", "chat_template_kwargs"),
                    Refused("it is for chats")),
    **dict.fromkeys(("reasoning_budget_start_tag", "reasoning_budget_end_tags"), Refused("the template has them")),
    "generation_prompt": Refused("the template writes it"),
    "parse_tool_calls": Refused("calls are always parsed", (True,)),
}  # fmt: skip

_VLLM: Foreign = {
    "request_id": "send the header X-Request-Id",
    "spaces_between_special_tokens": "special tokens are spelled without spaces",
    "guided_decoding_backend": "there is one",
    **dict.fromkeys(("use_beam_search", "beam_width"), Refused("there is no beam search")),
    "length_penalty": Refused("there is no beam search", (1,)),
    "early_stopping": Refused("there is no beam search"),
    "priority": Refused("clients take turns"),
    "cache_salt": Refused("the prefix cache is one for all clients"),
    "prompt_logprobs": Refused("give echo and logprobs to /v1/completions", (None,)),
    "return_token_ids": Refused("it is for /v1/completions"),
    "return_tokens_as_token_ids": Refused("tokens are spelled"),
    "guided_whitespace_pattern": Refused("white space is limited"),
    **dict.fromkeys(("logits_processors", "vllm_xargs", "kv_transfer_params", "repetition_detection"),
                    Refused("there is nothing of this kind")),
    "mm_processor_kwargs": TEXT_ONLY,
    "chat_template": Refused("start the server with --chat-template"),
}  # fmt: skip

GENERATION: Foreign = {**OPENAI, **_PEER, **_VLLM}


def unknown_fields(body: Any, value: Any, path: str = "") -> Iterator[tuple[str, str | None]]:
    """Unknown fields of a body: their paths, with the nearest names.

    `value` is the body as it was converted. Raises BadRequestError for a field that is refused.
    """
    if isinstance(value, list):
        for i, (item, converted) in enumerate(zip(body, value, strict=True)):
            if isinstance(item, dict | list):
                yield from unknown_fields(item, converted, f"{path}[{i}]")
        return
    if not isinstance(value, msgspec.Struct):
        return
    known = {name: getattr(value, own) for own, name in _names(type(value))}
    foreign: Foreign = getattr(type(value), "foreign", {})
    for name, item in body.items():
        place = f"{path}.{name}" if path else name
        if name in known:
            if isinstance(item, dict | list):
                yield from unknown_fields(item, known[name], place)
        elif name not in foreign:
            yield place, next(iter(difflib.get_close_matches(name[:64], [*known, *foreign], 1)), None)
        elif isinstance(refused := foreign[name], Refused) and refused.refuses(item):
            error = BadRequestError(f"{place}: it is not supported: {refused.reason}", place, "unsupported_parameter")
            error.details = dict(refused.details)
            raise error


def _names(kind: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    return zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
