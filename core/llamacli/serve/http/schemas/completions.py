"""Schemas of `/v1/completions` and `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from llamacli.serve.http.schemas.chat import ContentPart
from llamacli.serve.http.schemas.common import MAX_TOP_LOGPROBS, Generation, Limit, TokenId
from llamacli.serve.http.schemas.foreign import GENERATION, OPENAI, Foreign, Refused, Schema

MAX_PROMPTS = 64
MAX_INPUTS = 2048


class PromptText(Schema, kw_only=True):
    """Text of a prompt in an object, whole or in parts.

    `multimodal_data` are pictures, base64 of their files, one for each `<__media__>` in `prompt_string`; in `content`
    they are parts `image_url`.
    """

    prompt_string: str | None = None
    multimodal_data: Annotated[list[str], Meta(max_length=64)] | None = None
    content: list[ContentPart] | None = None


Prompt = str | PromptText | list[str | TokenId | PromptText | list[str | TokenId]]
"""One text, several, or the token ids of one or several; a list with an id is one prompt of ids and texts."""


class CompletionRequest(Generation, kw_only=True):
    """Request of `/v1/completions`.

    With `parse_special`, special tokens spelled in texts become their ids; `add_special_tokens` false leaves out BOS.
    `prompt_embeds` are further prompts, before those of text: base64 of .npy or safetensors with rows of embeddings.
    """

    foreign: ClassVar[Foreign] = {name: why for name, why in GENERATION.items() if name != "return_token_ids"}

    prompt: Prompt | None = None
    prompt_embeds: str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)] | None = None
    max_tokens: Limit | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: str | None = None
    best_of: int | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None


class EmbeddingsRequest(Schema, kw_only=True):
    """Request of `/v1/embeddings`.

    With `dimensions` only the first numbers are returned, as a vector of length 1.
    """

    foreign: ClassVar[Foreign] = {
        **OPENAI,
        "priority": Refused("clients take turns"),
        "add_special_tokens": Refused("texts are encoded with the special tokens of the model", (True,)),
        "embd_normalize": Refused("give it to /embedding", (2,)),
    }

    input: Prompt
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate_prompt_tokens: Limit | None = None
