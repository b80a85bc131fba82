"""Schemas of `/v1/completions` and `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from llamacli.serve.http.schemas.common import MAX_TOP_LOGPROBS, CountOrZero, Generation

MAX_PROMPTS = 64
MAX_INPUTS = 2048

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Prompt = str | list[str | TokenId | list[TokenId]]
"""One text, several, the token ids of one, or those of several; elements may be mixed."""


class CompletionRequest(Generation, kw_only=True):
    """Request of `/v1/completions`.

    With `parse_special`, special tokens spelled in texts become their ids.
    """

    prompt: Prompt
    max_tokens: CountOrZero | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: str | None = None
    best_of: int | None = None
    parse_special: bool | None = None


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """Request of `/v1/embeddings`."""

    input: Prompt
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
