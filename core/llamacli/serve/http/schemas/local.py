"""Schemas of the endpoints of llama.cpp's and vLLM's servers for tokens."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamacli.serve.http.schemas.chat import MAX_MESSAGES, ChatMessage, Tool
from llamacli.serve.http.schemas.common import MAX_TOOLS, TokenId
from llamacli.serve.http.schemas.foreign import Schema


class TokenizeRequest(Schema, kw_only=True):
    """Request of `/tokenize`: llama.cpp's `content`, or vLLM's `prompt` or `messages`."""

    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    model: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Schema, kw_only=True):
    """Request of `/detokenize`."""

    tokens: list[TokenId]
    model: str | None = None
