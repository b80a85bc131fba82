"""Schemas of ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from llamacli.serve.http.schemas.chat import MAX_MESSAGES, Tool
from llamacli.serve.http.schemas.common import MAX_STOPS, MAX_TOOLS, MAX_TOP_LOGPROBS, Text, sampling_struct
from llamacli.serve.http.schemas.completions import MAX_INPUTS
from llamacli.serve.http.schemas.foreign import Foreign, Refused, Schema

MAX_TEMPLATE = 1 << 17

_SERVED: Foreign = {
    "options": "vectors depend on the text only",
}

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n",
            "presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta")  # fmt: skip
"""Sampling parameters that ollama has."""


class OllamaOptions(sampling_struct(*SAMPLING), Schema, kw_only=True):  # type: ignore[misc]
    """Parameters of a model."""

    foreign: ClassVar[Foreign] = {
        **dict.fromkeys(("num_gpu", "main_gpu", "num_thread", "num_batch", "numa", "low_vram", "use_mmap", "use_mlock",
                         "f16_kv", "vocab_only"), "the server's options decide"),
        "num_keep": "prompts are never shifted or cut",
        "tfs_z": Refused("the samplers do not have it", (1,)),
        "penalize_newline": Refused("the samplers do not have it", (True,)),
    }  # fmt: skip

    num_predict: Annotated[int, Meta(ge=-2)] | None = None
    num_ctx: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=MAX_STOPS)] | None = None


class OllamaFunctionCall(Schema, kw_only=True):
    """Function that was called, with its arguments."""

    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaToolCall(Schema, kw_only=True):
    """Tool call of an assistant's message."""

    function: OllamaFunctionCall
    id: str | None = None


class OllamaMessage(Schema, kw_only=True):
    """Message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBase(Schema, kw_only=True):
    """Fields that `/api/chat` and `/api/generate` share."""

    foreign: ClassVar[Foreign] = {
        **dict.fromkeys(("truncate", "shift"), "prompts are never shifted or cut"),
        "_debug_render_only": Refused("use /apply-template"),
    }

    model: str
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class OllamaChat(OllamaBase, kw_only=True):
    """Request of `/api/chat`."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerate(OllamaBase, kw_only=True):
    """Request of `/api/generate`."""

    foreign: ClassVar[Foreign] = {
        **OllamaBase.foreign,
        "context": Refused("use /api/chat"),
        "template": Refused("start the server with --chat-template"),
    }

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaEmbed(Schema, kw_only=True):
    """Request of `/api/embed`."""

    foreign: ClassVar[Foreign] = _SERVED

    model: str
    keep_alive: str | float | None = None
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]
    dimensions: int | None = None
    truncate: bool | None = None


class OllamaEmbeddings(Schema, kw_only=True):
    """Request of `/api/embeddings`."""

    foreign: ClassVar[Foreign] = _SERVED

    model: str
    keep_alive: str | float | None = None
    prompt: str


class OllamaName(Schema, kw_only=True):
    """Request of `/api/show`; `name` is an older name of `model`."""

    foreign: ClassVar[Foreign] = {"verbose": "all metadata but lists are shown"}

    model: str | None = None
    name: str | None = None


class OllamaTarget(Schema, kw_only=True):
    """Request of `/api/pull`, `/api/push` and `/api/delete`.

    `name` is an older name of `model`.
    """

    foreign: ClassVar[Foreign] = {
        "insecure": Refused("the hub is asked over TLS"),
        **dict.fromkeys(("username", "password"), Refused("set HF_TOKEN for the server")),
    }

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class OllamaCopy(Schema, kw_only=True):
    """Request of `/api/copy`."""

    source: str
    destination: str


class OllamaCreate(Schema, kw_only=True):
    """Request of `/api/create`.

    The model is that of a name in `from`, or of `files`: names with the digests of blobs. `modelfile` is the text of a
    Modelfile in the place of the other fields. A `template` is Jinja.
    """

    foreign: ClassVar[Foreign] = {
        "license": "licenses are not shown",
        "messages": Refused("give the messages with each request"),
        "path": Refused("give files or from"),
        "info": "the file's metadata has it",
        "renderer": Refused("templates are rendered"),
        "parser": Refused("replies are read by their template"),
    }

    model: str | None = None
    name: str | None = None
    base: str | None = msgspec.field(default=None, name="from")
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    template: Annotated[str, Meta(max_length=MAX_TEMPLATE)] | None = None
    system: str | None = None
    parameters: dict[str, Any] | None = None
    quantize: str | None = None
    modelfile: str | None = None
    stream: bool | None = None
