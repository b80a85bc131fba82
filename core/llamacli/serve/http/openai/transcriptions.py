"""Endpoints `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from llamacli.media.sound import MAX_BYTES
from llamacli.serve.errors import BadRequestError, BodyTooLargeError
from llamacli.serve.http.call import Call
from llamacli.serve.http.errors import openai_body
from llamacli.serve.http.generation import prepared
from llamacli.serve.http.openai.files import received
from llamacli.serve.http.pictures import in_thread
from llamacli.serve.http.replies import joined
from llamacli.serve.http.schemas.chat import ChatMessage, ChatRequest, ContentPart, ForeignPart, InputAudio
from llamacli.serve.http.schemas.foreign import Foreign, Refused, Schema
from llamacli.serve.http.sse import DONE, event
from llamacli.serve.requests import Done, Event, TextDelta, Usage

NO_TIMES = "models write text without times"


class SpeechRequest(Schema, kw_only=True):
    """Fields of a form beside its `file`."""

    foreign: ClassVar[Foreign] = {
        **dict.fromkeys(("timestamp_granularities[]", "timestamp_granularities"), Refused(NO_TIMES)),
        **dict.fromkeys(("include[]", "include"), Refused("/v1/chat/completions has log-probabilities")),
        "chunking_strategy": Refused("the encoder divides the sound"),
        **dict.fromkeys(
            (f"{name}{end}" for name in ("known_speaker_names", "known_speaker_references") for end in ("[]", "")),
            Refused("speakers are not told apart"),
        ),
        **dict.fromkeys(("keywords[]", "keywords", "languages[]", "languages"), Refused("write it into the prompt")),
    }

    model: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None


class TranscriptionRequest(SpeechRequest, kw_only=True):
    """Fields of a form of `/v1/audio/transcriptions`."""

    language: str | None = None


class TranslationRequest(SpeechRequest, kw_only=True):
    """Fields of a form of `/v1/audio/translations`."""

    foreign: ClassVar[Foreign] = {**SpeechRequest.foreign, "language": Refused("translations are in English", ("en",))}


async def transcriptions(call: Call) -> None:
    """Write down the speech of a file."""
    data, fields = await _form(call)
    request = call.checked(fields, TranscriptionRequest, strict=False)
    # The words are llama-server's.
    prompt = request.prompt or "Transcribe audio to text"
    if request.language:
        prompt += f" (language: {request.language})"
    await _answer(call, request, data, prompt, {"task": "transcribe", "language": request.language or "unknown"})


async def translations(call: Call) -> None:
    """Translate the speech of a file into English."""
    data, fields = await _form(call)
    request = call.checked(fields, TranslationRequest, strict=False)
    prompt = request.prompt or "Translate audio to English text"
    await _answer(call, request, data, prompt, {"task": "translate", "language": "english"})


async def _form(call: Call) -> tuple[bytes, dict[str, str]]:
    limit, kept = min(MAX_BYTES, call.settings.max_body), bytearray()

    async def keep(_: int, part: bytes) -> None:
        kept.extend(part)
        if len(kept) > limit:
            raise BodyTooLargeError(f"file: it is larger than the limit of {limit} bytes")

    form, _ = await received(call, keep)
    if form.filename is None:
        raise BadRequestError("file: it is required", "file", "missing_required_parameter")
    return bytes(kept), form.fields


async def _answer(call: Call, request: SpeechRequest, data: bytes, prompt: str, about: dict[str, Any]) -> None:
    """Answer with the reply to the prompt and the sound.

    `about` are further fields of `verbose_json`.
    """
    kind = request.response_format
    if kind in ("srt", "vtt"):
        raise BadRequestError(
            f"response_format: {kind!r} is not supported: {NO_TIMES}", "response_format", "unsupported_value"
        )
    if request.stream and kind == "verbose_json":
        raise BadRequestError("stream: not with verbose_json, which is one object", "stream", "unsupported_value")
    info, model = await call.model(request.model)
    if not info.hears:
        raise BadRequestError("file: not supported, this model has no encoder of sound", "file", "unsupported_content")
    parts: list[ContentPart] = [
        ContentPart(type="text", text=prompt),
        ForeignPart(type="input_audio", input_audio=InputAudio(data=base64.b64encode(data).decode()), place="file"),
    ]
    chat = ChatRequest(messages=[ChatMessage(role="user", content=parts)], model=request.model,
                       temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed)  # fmt: skip
    made = await prepared(call, chat)
    async with call.run(made.generation) as events:
        if request.stream:
            await _stream(call, events)
            return
        reply = await joined(events, made.generation, 1)
    text = "".join(reply.choices[0].text).strip()
    if kind == "text":
        await call.respond_bytes(f"{text}\n".encode(), "text/plain; charset=utf-8")
    elif kind == "json":
        await call.respond({"text": text, "usage": _usage(reply.usage)})
    else:
        seconds = await in_thread(call, model.media_encoder().seconds_of_file, data)
        usage = {"type": "duration", "seconds": seconds}
        await call.respond({**about, "duration": seconds, "text": text, "usage": usage})


async def _stream(call: Call, events: AsyncIterator[Event]) -> None:
    text = ""
    async with call.stream(error_event=lambda error: event(openai_body(error))) as write:
        async for one in events:
            match one:
                case TextDelta(reasoning=False):
                    text += one.text
                    await write(event({"type": "transcript.text.delta", "delta": one.text}))
                case Done():
                    end = {"type": "transcript.text.done", "text": text.strip(), "usage": _usage(one.usage)}
                    await write(event(end))
        await write(DONE)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": usage.prompt,
        "output_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "input_tokens_details": {"cached_tokens": usage.cached},
    }
