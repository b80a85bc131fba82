"""Replies of the engine.

Whole choices for plain responses, and numbers of tokens and times.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import attrs

from llamacli.chat import openai
from llamacli.chat.messages import ToolCall
from llamacli.serve.requests import (
    ArgumentsDelta,
    Done,
    Embedding,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    PromptProgress,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ID_LENGTH = 9


@attrs.define
class Choice:
    """Text of one choice, as it was joined.

    `tokens` are those of its text, without reasoning.
    """

    text: list[str] = attrs.field(factory=list)
    reasoning: list[str] = attrs.field(factory=list)
    tokens: list[TokenLogprob] = attrs.field(factory=list)
    calls: list[tuple[str, ToolCall]] = attrs.field(factory=list)
    finish: FinishReason = "stop"
    stop_string: str | None = None
    timed_out: bool = False


@attrs.define
class Reply:
    """All events of a request, joined."""

    choices: list[Choice]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = attrs.field(factory=dict)
    vectors: dict[int, Any] = attrs.field(factory=dict)
    usage: Usage = attrs.field(factory=lambda: Usage(0))
    timings: Timings = attrs.field(factory=lambda: Timings(0.0, 0.0, 0.0))


async def joined(events: AsyncIterator[Event], request: GenerationRequest | None, n_choices: int) -> Reply:
    """Join the events of a request to its reply."""
    reply = Reply([Choice() for _ in range(n_choices)])
    async for event in events:
        match event:
            case TextDelta(reasoning=True):
                reply.choices[event.index].reasoning.append(event.text)
            case TextDelta():
                reply.choices[event.index].text.append(event.text)
                reply.choices[event.index].tokens += event.tokens
            case ToolCallDelta():
                assert request is not None
                reply.choices[event.index].calls.append((call_id(request, event), event.call))
            case Finished():
                choice = reply.choices[event.index]
                choice.finish, choice.stop_string, choice.timed_out = event.reason, event.stop_string, event.timed_out
            case PromptLogprobs():
                reply.prompt_logprobs[event.prompt] = event.tokens
            case Embedding():
                reply.vectors[event.prompt] = event.vector
            case Done():
                reply.usage, reply.timings = event.usage, event.timings
    return reply


def call_id(request: GenerationRequest, event: ArgumentsDelta | ToolCallDelta) -> str:
    """Id of a tool call.

    Nine letters and digits, as some templates insist on.
    A function of the request, so that equal requests give equal replies, and different in each turn of a conversation.
    """
    ids = b"".join(token.to_bytes(4) for prompt in request.prompts for token in prompt)
    number = int.from_bytes(hashlib.sha256(ids + f"{request.seed} {event.index} {event.number}".encode()).digest())
    letters = ""
    for _ in range(_ID_LENGTH):
        number, letter = divmod(number, len(_ID_ALPHABET))
        letters += _ID_ALPHABET[letter]
    return letters


def openai_usage(usage: Usage) -> dict[str, Any]:
    """Numbers of tokens in the shape of OpenAI's API."""
    rejected = usage.drafted - usage.accepted
    predicted = {"accepted_prediction_tokens": usage.accepted, "rejected_prediction_tokens": rejected}
    return {
        **openai.usage(usage.prompt, usage.generated),
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning, **(predicted if usage.predicted else {})},
    }


def llamacpp_timings(usage: Usage, timings: Timings, *, timed_out: bool = False) -> dict[str, Any]:
    """Numbers of tokens and times in the shape of llama-server's API.

    The first token comes of the prompt's last step: the rate of the others is that of generation.
    """
    n_prompt, n_later = usage.prompt - usage.cached, max(0, usage.generated - 1)
    return {
        "cache_n": usage.cached,
        "prompt_n": n_prompt,
        "prompt_ms": timings.prompt_s * 1000,
        "prompt_per_token_ms": timings.prompt_s * 1000 / max(1, n_prompt),
        "prompt_per_second": _rate(n_prompt, timings.prompt_s),
        "predicted_n": usage.generated,
        "predicted_ms": timings.generate_s * 1000,
        "predicted_per_token_ms": timings.generate_s * 1000 / n_later if n_later else 0.0,
        "predicted_per_second": _rate(n_later, timings.generate_s),
        "queue_ms": timings.queue_s * 1000,
        "preempted_n": timings.n_preempted,
        **({"draft_n": usage.drafted, "draft_n_accepted": usage.accepted} if usage.drafted else {}),
        **({"timed_out": True} if timed_out else {}),
    }


def llamacpp_progress(progress: PromptProgress) -> dict[str, Any]:
    """Progress of the prompt in the shape of llama-server's API."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": progress.seconds * 1000,
    }


def progress_timings(progress: PromptProgress) -> dict[str, Any]:
    """Numbers and times within the prompt, in the shape of llama-server's API."""
    return llamacpp_timings(Usage(progress.processed, progress.cached), Timings(0.0, progress.seconds, 0.0))


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0
