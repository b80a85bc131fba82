"""Endpoints of ollama's API, `/api/*`, for its official clients."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import attrs

from llamacli.chat.formats import own_templates
from llamacli.chat.logprobs import chat_logprobs
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http import local
from llamacli.serve.http.call import Call
from llamacli.serve.http.chats import codec_of
from llamacli.serve.http.errors import ollama_body
from llamacli.serve.http.generation import Prepared, prepared
from llamacli.serve.http.openai.embeddings import embedded
from llamacli.serve.http.replies import joined
from llamacli.serve.http.schemas.chat import (
    CallOfTool,
    ChatMessage,
    ChatRequest,
    ContentPart,
    ForeignPart,
    FunctionCall,
)
from llamacli.serve.http.schemas.common import ResponseFormat
from llamacli.serve.http.schemas.completions import CompletionRequest, Prompt
from llamacli.serve.http.schemas.ollama import (
    SAMPLING,
    OllamaBase,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaMessage,
    OllamaName,
    OllamaOptions,
)
from llamacli.serve.http.sse import NDJSON_HEADERS, line
from llamacli.serve.requests import (
    Done,
    Event,
    Finished,
    FinishReason,
    ModelInfo,
    Preset,
    TextDelta,
    ToolCallDelta,
)

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smh]|)", re.ASCII)
_DURATION = re.compile(rf"(?P<sign>-?)(?P<parts>(?:{_PART.pattern})+)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1, "": 1, "m": 60, "h": 3600}
_AT_ONCE = (0, "0", "0s", "0m", "0h")
"""Values of `keep_alive` that unload a model."""


async def chat(call: Call, request: OllamaChat) -> None:
    """Reply to a conversation, as JSON lines or whole."""
    if not request.messages:
        await _load(call, request, "message")
        return
    chat = ChatRequest(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)],
        tools=request.tools,
        **_parameters(request),
        **_thinking(request),
    )
    await _check(call, request)
    await _reply(call, request, await prepared(call, chat), "message")


async def generate(call: Call, request: OllamaGenerate) -> None:
    """Continue a text, or reply to it by the model's chat template."""
    if not request.prompt and not request.images:
        await _load(call, request, "response")
        return
    await _check(call, request)
    wanted: ChatRequest | CompletionRequest
    if request.raw or request.suffix or not await _has_template(call, request.model):
        if request.images:
            reason = "pictures need a chat template, and neither raw nor suffix"
            raise BadRequestError(f"images: {reason}", "images", "unsupported_content")
        wanted = CompletionRequest(
            prompt=request.prompt or "", suffix=request.suffix, parse_special=request.raw, **_parameters(request)
        )
        wanted.max_tokens = wanted.max_tokens or -1  # no limit
    else:
        messages = [ChatMessage(role="user", content=_content(request.prompt or "", request.images, "images"))]
        if request.system:
            messages.insert(0, ChatMessage(role="system", content=request.system))
        wanted = ChatRequest(messages=messages, **_parameters(request), **_thinking(request))
    await _reply(call, request, await prepared(call, wanted), "response")


async def embed(call: Call, request: OllamaEmbed) -> None:
    """Vectors of texts."""
    started = time.monotonic_ns()
    _keep_alive(call, request.model, request.keep_alive)
    texts: Prompt = request.input if isinstance(request.input, str) else list(request.input)
    reply, info = await embedded(call, request.model, texts, request.dimensions, -1 if request.truncate else None)
    await call.respond(
        {
            "model": info.name,
            "embeddings": [reply.vectors[i].tolist() for i in sorted(reply.vectors)],
            "total_duration": time.monotonic_ns() - started,
            "load_duration": 0,
            "prompt_eval_count": reply.usage.prompt,
        }
    )


async def embeddings(call: Call, request: OllamaEmbeddings) -> None:
    """Vector of one text, in the older form."""
    _keep_alive(call, request.model, request.keep_alive)
    reply, _ = await embedded(call, request.model, request.prompt)
    await call.respond({"embedding": reply.vectors[0].tolist()})


async def tags(call: Call) -> None:
    """All models that the server has."""
    await call.respond({"models": [_tag(info) for info in call.server.engine.models()]})


async def running(call: Call) -> None:
    """Models that are loaded."""
    models = [
        {**_tag(info), "expires_at": _timestamp(2**31), "size_vram": 0, "context_length": info.n_ctx or 0}
        for info in call.server.engine.models()
        if info.loaded
    ]
    await call.respond({"models": models})


async def show(call: Call, request: OllamaName) -> None:
    """Metadata and template of a model."""
    info, model = await call.model(request.model or request.name)
    metadata = {
        key: value
        for key in model.metadata
        if isinstance(value := model.metadata.get(key), str | int | float) and key != "tokenizer.chat_template"
    }
    pools = model.program.needs_whole_input or model.metadata.get(f"{model.arch}.pooling_type") is not None
    capabilities = ["embedding" if pools else "completion"]  # `ollama run` embeds the prompt where it sees embedding
    capabilities += ["insert"] * (model.tokenizer.infill_ids is not None)
    capabilities += ["vision"] * info.sees + ["audio"] * info.hears
    settings, preset = call.server.settings_of(info), info.preset or Preset()
    template = settings.template or own_templates(model.metadata).get("default", "")
    if template:
        codec = await call.server.run(codec_of, model, settings.template, False)
        capabilities += ["tools"] * codec.template.takes_tools()
        markers = filter(None, codec.syntax.reasoning_markers(""))
        capabilities += ["thinking"] * any(marker in codec.template.source for marker in markers)
    await call.respond(
        {
            "modelfile": _modelfile(info, preset),
            "parameters": "\n".join(f"{name} {json.dumps(value)}" for name, value in _shown(preset)),
            "template": template,
            **({"system": preset.system} if preset.system else {}),
            "details": _details(info),
            "model_info": metadata,
            "capabilities": capabilities,
            "modified_at": _timestamp(info.created),
        }
    )


async def version(call: Call) -> None:
    """Version of the server."""
    await call.respond({"version": local.version()})


def _modelfile(info: ModelInfo, preset: Preset) -> str:
    """Modelfile that `create` makes the same model of."""
    texts = {"TEMPLATE": preset.template, "SYSTEM": preset.system}
    lines = [f"FROM {info.name}", *(f'{name} """{text}"""' for name, text in texts.items() if text)]
    return "\n".join([*lines, *(f"PARAMETER {name} {json.dumps(value)}" for name, value in _shown(preset)), ""])


def _shown(preset: Preset) -> Iterator[tuple[str, Any]]:
    yield from preset.sampling.items()
    yield from (("stop", text) for text in preset.stop)
    yield from (("seed", preset.seed),) if preset.seed is not None else ()
    yield from (("num_predict", preset.max_tokens),) if preset.max_tokens is not None else ()


# --- requests


def _message(message: OllamaMessage, path: str) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=_content(message.content or "", message.images, f"{path}.images"),
        reasoning_content=message.thinking,
        tool_calls=[
            CallOfTool(function=FunctionCall(name=one.function.name, arguments=one.function.arguments), id=one.id)
            for one in message.tool_calls or ()
        ]
        or None,
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
    )


def _content(text: str, images: list[str] | None, path: str) -> str | list[ContentPart]:
    """Content with pictures, in base64, before the text."""
    if not images:
        return text
    parts: list[ContentPart] = [
        ForeignPart(type="image_url", image_url=image if image[:5] == "data:" else f"data:;base64,{image}", place=path)
        for image in images
    ]
    return [*parts, ContentPart(type="text", text=text)]


def _parameters(request: OllamaBase) -> dict[str, Any]:
    options = request.options or OllamaOptions()
    given = {name: getattr(options, name) for name in (*SAMPLING, "stop")}
    seed = options.seed if options.seed is not None and options.seed >= 0 else None
    n = options.num_predict
    return {
        **given,
        "seed": seed,
        "model": request.model,
        "response_format": _format(request.format),
        "max_tokens": n if n is not None and n > 0 else None,
        "n_probs": max(1, request.top_logprobs or 0) if request.logprobs else None,
    }


def _format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if isinstance(given, dict):
        return ResponseFormat(type="json_schema", schema=given)
    if given not in (None, "", "json"):
        raise BadRequestError(f"format is {given!r}; it must be json or a JSON Schema", "format")
    return ResponseFormat(type="json_object") if given else None


def _thinking(request: OllamaBase) -> dict[str, Any]:
    if isinstance(request.think, bool):
        return {"enable_thinking": request.think}
    return {"reasoning_effort": request.think} if request.think else {}


def _keep_alive(call: Call, name: str | None, given: str | float | None) -> None:
    """Set the time after which the model of a request is unloaded.

    It is in seconds, or a duration such as 5m or 1h30m; below 0 is never. A request without it has the server's. Raises
    BadRequestError, UnknownModelError.
    """
    seconds = None if isinstance(given, str) else given
    if isinstance(given, str):
        found = _DURATION.fullmatch(given.strip())
        if found is None:
            raise BadRequestError(f"keep_alive: {given[:40]!a} is not a duration such as 5m, 1h30m or -1", "keep_alive")
        parts = _PART.findall(found["parts"])
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts) * (-1 if found["sign"] else 1)
    call.server.engine.keep_alive(call.server.find_model(name).name, seconds)


async def _check(call: Call, request: OllamaBase) -> None:
    """Take `keep_alive`, and refuse a context longer than the server's.

    A shorter one would cut prompts.
    """
    _keep_alive(call, request.model, request.keep_alive)
    n_ctx = request.options.num_ctx if request.options is not None else None
    if n_ctx is None:
        return
    info, _ = await call.model(request.model)
    if info.n_ctx is not None and n_ctx > info.n_ctx:
        raise BadRequestError(f"num_ctx is {n_ctx}; this server's context has {info.n_ctx} tokens", "options.num_ctx")


async def _has_template(call: Call, name: str) -> bool:
    info, model = await call.model(name)
    try:
        await call.server.run(codec_of, model, call.server.settings_of(info).template, False)
    except BadRequestError:
        return False
    return True


async def _load(call: Call, request: OllamaBase, kind: str) -> None:
    """Load a model, or unload it with `keep_alive` 0.

    That is the meaning of requests without text.
    """
    unloads = request.keep_alive in _AT_ONCE
    if unloads:
        info = call.server.find_model(request.model)
        call.server.engine.unload(info.name)
    else:
        _keep_alive(call, request.model, request.keep_alive)
        info, _ = await call.model(request.model)
    empty = {"message": {"role": "assistant", "content": ""}} if kind == "message" else {"response": ""}
    await call.respond(
        {
            "model": info.name,
            "created_at": _now(),
            **empty,
            "done": True,
            "done_reason": "unload" if unloads else "load",
        }
    )


# --- responses


async def _reply(call: Call, request: OllamaBase, made: Prepared, kind: str) -> None:
    async with call.run(made.generation) as events:
        shapes = _Shapes(request, made.info, kind)
        if request.stream is False:
            await call.respond(shapes.whole(await joined(events, made.generation, 1)))
            return
        async with call.stream(NDJSON_HEADERS, lambda error: line(ollama_body(error))) as write:
            async for one in events:
                data = b"".join(map(line, shapes.lines(one)))
                if data:
                    await write(data)


class _Shapes:
    """Responses of a request: whole, and as lines of a stream."""

    def __init__(self, request: OllamaBase, info: ModelInfo, kind: str):
        self._info, self._kind = info, kind
        self._n_top = request.top_logprobs or 0 if request.logprobs else None
        self._started = time.monotonic_ns()
        self._finish: FinishReason = "stop"

    def whole(self, reply: Any) -> dict[str, Any]:
        """The response without a stream."""
        choice = reply.choices[0]
        self._finish = choice.finish
        calls = [
            {"function": {"name": one.name, "arguments": one.arguments}}
            for _, one in choice.calls
            if one.partial is None
        ]
        logprobs = {} if self._n_top is None else {"logprobs": self._logprobs(choice.tokens)}
        content = self._content("".join(choice.text), "".join(choice.reasoning), calls)
        return {**self._head(), **content, **logprobs, **self._end(Done(reply.usage, reply.timings))}

    def lines(self, one: Event) -> Iterator[dict[str, Any]]:
        """Lines of an event."""
        match one:
            case TextDelta(reasoning=True):
                yield {**self._head(), **self._content("", one.text, []), "done": False}
            case TextDelta():
                logprobs = {} if self._n_top is None else {"logprobs": self._logprobs(one.tokens)}
                yield {**self._head(), **self._content(one.text, "", []), **logprobs, "done": False}
            case ToolCallDelta() if one.call.partial is None:
                calls = [{"function": {"name": one.call.name, "arguments": one.call.arguments}}]
                yield {**self._head(), **self._content("", "", calls), "done": False}
            case Finished():
                self._finish = one.reason
            case Done():
                yield {**self._head(), **self._content("", "", []), **self._end(one)}

    def _head(self) -> dict[str, Any]:
        return {"model": self._info.name, "created_at": _now()}

    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        thought = {"thinking": thinking} if thinking else {}
        if self._kind == "response":
            return {"response": text, **thought}
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thought, **called}}

    def _logprobs(self, tokens: Any) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = chat_logprobs(tokens, self._n_top or 0)["content"]
        return content

    def _end(self, done: Done) -> dict[str, Any]:
        usage, timings = done.usage, done.timings
        return {
            "done": True,
            "done_reason": "length" if self._finish == "length" else "stop",
            "total_duration": time.monotonic_ns() - self._started,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": int(timings.prompt_s * 1e9),
            "eval_count": usage.generated,
            "eval_duration": int(timings.generate_s * 1e9),
        }


def _tag(info: ModelInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "model": info.name,
        "modified_at": _timestamp(info.created),
        "size": info.n_bytes,
        "digest": _digest(info),
        "details": _details(info),
    }


def _digest(info: ModelInfo) -> str:
    """Digest of a model's file and defaults, loaded or not.

    `ollama list` shows its first twelve digits.
    """
    known = info.path, info.created, None if info.preset is None else attrs.astuple(info.preset)
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _details(info: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": PurePath(info.path).suffix.removeprefix(".") or "gguf",  # files of the catalogue have no suffix
        "family": info.architecture,
        "families": [info.architecture] if info.architecture else [],
        "parameter_size": _count(info.n_params) if info.n_params else "",
        "quantization_level": info.file_type,
    }


def _count(n: int) -> str:
    """Number of parameters as ollama writes it: 8.0B, 135.00M."""
    return f"{n / 1e9:.1f}B" if n >= 10**9 else f"{n / 1e6:.2f}M"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def _timestamp(seconds: int) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
