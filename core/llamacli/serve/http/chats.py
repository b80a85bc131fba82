"""Chat requests of the API to requests of the engine."""

from __future__ import annotations

import datetime
import itertools
import json
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat import openai
from llamacli.chat.calls import Tools
from llamacli.chat.codec import ChatCodec
from llamacli.chat.constraints import Constraint, ToolUse, reply_constraint
from llamacli.chat.continuation import continued
from llamacli.chat.media import Layout, marked, prompt_of_pictures, with_pictures
from llamacli.chat.template import Rendering
from llamacli.errors import ChatTemplateError, InvalidRequestError, MediaError
from llamacli.inputs import Contents
from llamacli.media.encoder import Tile
from llamacli.model import Model
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.constraints import check_size, schema_of
from llamacli.serve.http.limits import expect_length, expect_room
from llamacli.serve.http.pictures import MEDIA
from llamacli.serve.http.prompts import truncated
from llamacli.serve.http.schemas.chat import ChatMessage, ChatRequest, ForeignPart, Tool, ToolChoice
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.requests import ModelInfo, ReplyFormat

MAX_VARIABLES = 256 << 10
"""Size limit of `chat_template_kwargs` as JSON, in characters."""

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_ONLY = "not supported, this model reads text only"
_codecs: weakref.WeakKeyDictionary[Model, dict[tuple[str | None, bool], ChatCodec]] = weakref.WeakKeyDictionary()


@attrs.frozen
class Prompt:
    """Rendered conversation.

    Its text, token ids, format of the reply, and the grammar of the reply; `prediction` are token ids of the reply that
    is expected. With pictures the ids are content keys, of `contents` and `tiles` as in GenerationRequest.
    """

    text: str
    ids: tuple[int, ...]
    reply: ReplyFormat
    constraint: Constraint
    prediction: tuple[int, ...] = ()
    contents: Contents | None = None
    tiles: Mapping[int, tuple[Tile, int]] = attrs.field(factory=dict)


def chat_prompt(
    request: ChatRequest,
    model: Model,
    info: ModelInfo,
    settings: HttpSettings,
    pictures: Sequence[Layout] = (),
    *,
    fits: bool = True,
) -> Prompt:
    """Render and tokenize a chat request.

    `pictures` are the layouts of its pictures, in order. With `fits` it must fit into a context. Raises BadRequestError
    for what the model's template or its syntax cannot express, PromptTooLongError for texts that cannot fit.
    """
    schema, grammar = schema_of(request)
    if (request.reasoning_format or "").endswith(("none", "legacy")):
        reason = "reasoning is `reasoning_content`, not part of the text"
        raise BadRequestError(f"reasoning_format: {reason}", "reasoning_format", "unsupported_parameter")
    tools = tool_use(request)
    if tools is not None and tools.required and (schema is not None or grammar is not None):
        raise BadRequestError("tool_choice: a required call excludes response_format and grammar", "tool_choice")
    if pictures and request.truncate_prompt_tokens is not None:
        reason = "prompts with pictures are not truncated"
        raise BadRequestError(f"truncate_prompt_tokens: {reason}", "truncate_prompt_tokens", "unsupported_parameter")
    messages = as_dicts(request.messages, pictures)
    if settings.system and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": settings.system})
    variables = default_variables(settings, request.tools or ()) | template_variables(request)
    described = None if tools is None else tools_as_dicts(request.tools or ())
    continues = _continues(request, messages)
    if continues and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
        raise BadRequestError("continue_final_message: the last message must be text of the assistant", "messages")
    if continues and request.add_generation_prompt:
        raise BadRequestError("add_generation_prompt and continue_final_message exclude each other",
                              "add_generation_prompt")  # fmt: skip
    if request.echo and not continues:
        raise BadRequestError("echo: it needs continue_final_message", "echo")
    codec = codec_of(model, settings.template, tools is not None)
    if continues:
        messages[-1]["content"] = _begun(request.messages[-1])
    if request.continue_final_message == "reasoning_content":
        messages[-1]["content"] = ""
    messages, shown = marked(messages)
    try:
        if continues:
            what = None if isinstance(request.continue_final_message, bool) else request.continue_final_message
            rendering = continued(codec, messages, what, tools=described, variables=variables)
        else:
            prompting = request.add_generation_prompt is not False
            rendering = codec.render(messages, tools=described, variables=variables, add_generation_prompt=prompting)
    except ChatTemplateError as error:
        raise BadRequestError(str(error), "messages", "chat_template_error") from None
    except InvalidRequestError as error:
        raise BadRequestError(str(error), "chat_template_kwargs") from None
    if shown:
        rendering = _with_pictures(rendering, shown, model)
    if not fits:
        expect_length(len(rendering.text), "messages")
    elif request.truncate_prompt_tokens is None:
        parts = (part.ids if isinstance(part, Tile) else part for part in rendering.parts)
        expect_room((part for part in parts if not isinstance(part, int)), model, info)
    if shown:
        ids, contents, tiles = prompt_of_pictures(rendering.parts, codec.template.encode, model.media_encoder())
    else:
        contents, tiles = None, {}
        ids = truncated(codec.encode(rendering), request.truncate_prompt_tokens, info.n_ctx or model.config.n_ctx)
    if not ids:
        raise BadRequestError("the chat template renders an empty prompt", "messages", "chat_template_error")
    try:
        constraint = reply_constraint(codec, rendering.prompt, schema, grammar, tools)
    except InvalidRequestError as error:
        if str(error).startswith("json_schema"):
            raise BadRequestError(str(error), "tools", "invalid_schema") from None
        raise BadRequestError(str(error), "tool_choice") from None
    constraint = attrs.evolve(constraint, markers=codec.thought_markers(rendering))
    reply = reply_format(codec, rendering, described or (), variables)
    return Prompt(rendering.text, tuple(ids), reply, constraint, _predicted(request, model), contents, tiles)


def _predicted(request: ChatRequest, model: Model) -> tuple[int, ...]:
    """Token ids of the prediction. Raises FieldError."""
    if request.prediction is None:
        return ()
    content = request.prediction.content
    if not isinstance(content, str):
        content = "".join(
            openai.text_of_part(part.type, part.text if part.type == "text" else None, f"prediction.content[{i}]")
            for i, part in enumerate(content)
        )
    return tuple(model.tokenizer.encode_run(content, continues=True))


def _with_pictures(rendering: Rendering, pictures: Mapping[str, Layout], model: Model) -> Rendering:
    try:
        return with_pictures(rendering, pictures, model.media_encoder(), model.tokenizer)
    except ChatTemplateError as error:
        raise BadRequestError(str(error), "messages", "chat_template_error") from None
    except MediaError as error:
        raise BadRequestError(str(error), "messages", "unsupported_content") from None


def _continues(request: ChatRequest, messages: list[dict[str, Any]]) -> bool:
    """True if the reply continues the last message.

    By default one of the assistant is continued, as by llama-server.
    """
    if request.continue_final_message is not None or request.add_generation_prompt is not None:
        return bool(request.continue_final_message)
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"]:
        return False
    if messages[-2:-1] and messages[-2]["role"] == "assistant":
        raise BadRequestError("messages: two of the assistant are at the end, and a reply continues one", "messages")
    return True


def echoed_text(request: ChatRequest) -> str:
    """Text of the last message that the reply repeats, "" for none."""
    return _begun(request.messages[-1]) if request.echo else ""


def _begun(message: ChatMessage) -> str:
    """Text of a message that the reply continues.

    Between its parts are blank lines, as llama-server's.
    """
    content = message.content or ""
    if isinstance(content, str):
        return content
    return "\n\n".join(itertools.dropwhile(operator.not_, (part.text or "" for part in content)))


def codec_of(model: Model, template: str | None, tools: bool) -> ChatCodec:
    """Codec of a model's chat template, kept with the model.

    Raises BadRequestError if it has no template.
    """
    kept = _codecs.setdefault(model, {})
    codec = kept.get((template, tools))
    if codec is None:
        try:
            codec = model.create_chat_codec(template, tools=tools)
        except ChatTemplateError as error:
            raise BadRequestError(str(error), None, "chat_template_error") from None
        kept[template, tools] = codec
    return codec


def reply_format(codec: ChatCodec, rendering: Rendering, tools: Tools, variables: dict[str, Any]) -> ReplyFormat:
    """Format of the reply to a rendering."""
    ends = codec.ends(variables)
    markers = {token: codec.spelled(token) for token in codec.template.structure}
    return ReplyFormat(
        syntax=codec.syntax,
        prompt=rendering.prompt,
        begun=rendering.begun,
        tools=tools,
        markers={token: text for token, text in markers.items() if text},
        end_ids=ends.tokens,
        end_text=ends.text,
        end_unless=ends.unless,
    )


def as_dicts(messages: Sequence[ChatMessage], pictures: Sequence[Layout] = ()) -> list[dict[str, Any]]:
    """Messages as chat templates take them, and `marked`.

    `pictures` take the place of the parts that have them; without, such parts are refused. Raises BadRequestError,
    FieldError.
    """
    left = iter(pictures) if pictures else None
    return [_as_dict(message, f"messages[{i}]", left) for i, message in enumerate(messages)]


def tool_use(request: ChatRequest) -> ToolUse | None:
    """Tools that the reply may or must call, None for none.

    Raises BadRequestError, FieldError.
    """
    choice, tools = request.tool_choice, tools_as_dicts(request.tools or ())
    check_size(sum(len(json.dumps(tool["function"]["parameters"])) for tool in tools), "tools")
    named = {"function": {"name": choice.function.name}} if isinstance(choice, ToolChoice) else choice
    return openai.tool_use(tools, named, parallel=request.parallel_tool_calls is not False)


def default_variables(settings: HttpSettings, tools: Sequence[Tool]) -> dict[str, Any]:
    """Variables of chat templates that llama-server sets too.

    The date is the server's; `functions` are the tools as JSON.
    """
    now = datetime.datetime.now()
    return {
        "enable_thinking": settings.reasoning,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
        "functions": json.dumps(tools_as_dicts(tools), indent=2) if tools else "",
    }


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template that a request sets. Raises BadRequestError."""
    variables = dict(request.chat_template_kwargs or {})
    if request.documents is not None:
        variables["documents"] = request.documents
    size = len(json.dumps(variables))
    if size > MAX_VARIABLES:
        reason = f"it has {size} characters of JSON; {MAX_VARIABLES} are allowed"
        raise BadRequestError(f"chat_template_kwargs: {reason}", "chat_template_kwargs", "invalid_value")
    if request.reasoning_effort == "none":
        variables["enable_thinking"] = False
    elif request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    if request.enable_thinking is not None:
        variables["enable_thinking"] = request.enable_thinking
    return variables


def _as_dict(message: ChatMessage, path: str, pictures: Iterator[Layout] | None) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise BadRequestError(f"{path}.role is {message.role!r}; it must be one of {', '.join(_ROLES)}", f"{path}.role")
    if message.content is None and role != "assistant":
        raise BadRequestError(f"{path}.content: it is required", f"{path}.content", "missing_required_parameter")
    result: dict[str, Any] = {"role": role, "content": _content(message, path, pictures)}
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def _content(message: ChatMessage, path: str, pictures: Iterator[Layout] | None) -> str | list[Any]:
    if isinstance(message.content, str) or message.content is None:
        return message.content or ""
    sees = pictures is not None and message.role != "assistant"
    parts: list[Any] = []
    for i, part in enumerate(message.content):
        if part.type in MEDIA and sees:
            assert pictures is not None
            parts.append(next(pictures))
            continue
        place = part.place if isinstance(part, ForeignPart) else f"{path}.content[{i}]"
        if part.type == "image_url" and isinstance(part, ForeignPart):
            raise BadRequestError(f"{place}: {_TEXT_ONLY}", place, "unsupported_content")
        text = openai.text_of_part(part.type, part.text if part.type == "text" else None, place)
        parts += ["\n", text] if parts and isinstance(parts[-1], str) else [text]
    return parts if any(not isinstance(part, str) for part in parts) else "".join(parts)


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Arguments for the template.

    An object where the text is one, else the text as it is.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def tools_as_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates take them."""
    described = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
        described.append({"type": "function", "function": function})
    return described
