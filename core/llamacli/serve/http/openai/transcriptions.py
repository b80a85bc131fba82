"""Endpoint `/v1/audio/transcriptions`."""

from __future__ import annotations

import base64
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from llamacli.media.sound import MAX_BYTES
from llamacli.serve.errors import BadRequestError, BodyTooLargeError
from llamacli.serve.http.call import Call
from llamacli.serve.http.generation import prepared
from llamacli.serve.http.openai.files import received
from llamacli.serve.http.replies import joined, openai_usage
from llamacli.serve.http.schemas.chat import ChatMessage, ChatRequest, ContentPart, ForeignPart, InputAudio
from llamacli.serve.http.schemas.foreign import Foreign, Refused, Schema

PROMPT = "Transcribe audio to text"
"""Text of the message, as llama-server's."""


class TranscriptionRequest(Schema, kw_only=True):
    """Fields of a form of `/v1/audio/transcriptions`, beside its `file`."""

    foreign: ClassVar[Foreign] = {
        "stream": Refused("a transcription is one object", ("false",)),
        **dict.fromkeys(("timestamp_granularities[]", "include[]", "chunking_strategy"), Refused("models write text")),
    }

    model: str | None = None
    prompt: str | None = None
    language: str | None = None
    response_format: Literal["json", "text"] = "json"
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None


async def transcriptions(call: Call) -> None:
    """Write down the speech of a file."""
    limit, kept = min(MAX_BYTES, call.settings.max_body), bytearray()

    async def keep(_: int, part: bytes) -> None:
        kept.extend(part)
        if len(kept) > limit:
            raise BodyTooLargeError(f"file: it is larger than the limit of {limit} bytes")

    form, _ = await received(call, keep)
    if form.filename is None:
        raise BadRequestError("file: it is required", "file", "missing_required_parameter")
    request = call.checked(form.fields, TranscriptionRequest, strict=False)
    info, _model = await call.model(request.model)
    if not info.hears:
        raise BadRequestError("file: not supported, this model has no encoder of sound", "file", "unsupported_content")
    prompt = (request.prompt or PROMPT) + (f" (language: {request.language})" if request.language else "")
    data = base64.b64encode(kept).decode()
    parts: list[ContentPart] = [
        ContentPart(type="text", text=prompt),
        ForeignPart(type="input_audio", input_audio=InputAudio(data=data), place="file"),
    ]
    chat = ChatRequest(messages=[ChatMessage(role="user", content=parts)], model=request.model,
                       temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed)  # fmt: skip
    made = await prepared(call, chat)
    async with call.run(made.generation) as events:
        reply = await joined(events, made.generation, 1)
    text = "".join(reply.choices[0].text).strip()
    if request.response_format == "text":
        await call.respond_bytes(f"{text}\n".encode(), "text/plain; charset=utf-8")
        return
    usage: dict[str, Any] = {"usage": openai_usage(reply.usage)} if reply.usage else {}
    await call.respond({"text": text, **usage})
