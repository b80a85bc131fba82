"""Schemas of `/rerank`, `/score`, `/classify` and `/pooling`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from llamacli.serve.http.schemas.common import Limit
from llamacli.serve.http.schemas.completions import MAX_INPUTS, Prompt
from llamacli.serve.http.schemas.foreign import OPENAI, TEXT_ONLY, Foreign, Refused, Schema

_POOLING: Foreign = {
    **OPENAI,
    "priority": Refused("clients take turns"),
    "add_special_tokens": Refused("texts are encoded with the special tokens of the model", (True,)),
    "mm_processor_kwargs": TEXT_ONLY,
    "request_id": "send the header X-Request-Id",
}


class TextOf(Schema, kw_only=True):
    """Text in an object, as Cohere's documents."""

    text: str


Text = str | TextOf
Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


class RankRequest(Schema, kw_only=True):
    """Request of `/rerank`: Jina's and Cohere's form has `documents`, TEI's has `texts`.

    The scores are those of the head; with `use_activation` they lie between 0 and 1, as vLLM's.
    """

    foreign: ClassVar[Foreign] = {
        **_POOLING,
        "raw_scores": "scores are those of the head, unless use_activation is given",
        "truncate": Refused("texts are not cut; give truncate_prompt_tokens"),
        "max_tokens_per_doc": Refused("texts are not cut; give truncate_prompt_tokens"),
        "max_chunks_per_doc": Refused("texts are not cut into chunks"),
        "rank_fields": Refused("documents are texts"),
    }

    query: str
    documents: Texts | None = None
    texts: Texts | None = None
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Limit | None = None


class ScoreRequest(Schema, kw_only=True):
    """Request of `/score`: pairs, or one text with each of others.

    `queries` and `documents`, or `queries` and `items`, are other names of `text_1` and `text_2`.
    """

    foreign: ClassVar[Foreign] = _POOLING

    text_1: Text | Texts | None = None
    text_2: Text | Texts | None = None
    queries: Text | Texts | None = None
    documents: Text | Texts | None = None
    items: Text | Texts | None = None
    model: str | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Limit | None = None


class ClassifyRequest(Schema, kw_only=True):
    """Request of `/classify`."""

    foreign: ClassVar[Foreign] = _POOLING

    input: Prompt
    model: str | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Limit | None = None


class PoolingRequest(Schema, kw_only=True):
    """Request of `/pooling`.

    `task`: `embed` for a vector of each text, `token_embed` for one of each token, `classify` for the scores of the
    classes; without it, as the model's pooling.
    """

    foreign: ClassVar[Foreign] = {
        **_POOLING,
        "softmax": Refused("give use_activation", (True,)),
        "activation": Refused("give use_activation", (True,)),
        "embed_dtype": Refused("numbers are float32", ("float32",)),
        "endianness": Refused("bytes are little-endian", ("native", "little")),
        "messages": Refused("give input; /apply-template has the text of messages"),
    }

    input: Prompt
    model: str | None = None
    task: Literal["embed", "token_embed", "classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Limit | None = None
