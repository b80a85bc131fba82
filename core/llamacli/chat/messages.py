"""Messages of a conversation, pieces of replies, and tool calls."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from llamacli.errors import InvalidRequestError, expect_type

if TYPE_CHECKING:
    from llamacli.media.pictures import Picture
    from llamacli.media.sound import Sound


@attrs.frozen
class ToolCall:
    """Tool call by the model.

    Its `name`, the `arguments` by name, and an `id` that the result refers to. `partial` is the text of arguments that
    are no whole object of JSON, because the reply was cut or the model made a mistake: `arguments` are empty then. Such
    a call is not to be made.
    """

    name: str
    arguments: dict[str, Any] = attrs.field(factory=dict)
    id: str = ""
    partial: str | None = None

    @property
    def text(self) -> str:
        """Arguments as JSON text."""
        return json.dumps(self.arguments, ensure_ascii=False) if self.partial is None else self.partial


@attrs.frozen
class CallDelta:
    """Piece of the arguments of a tool call, in JSON.

    The deltas of a call join to the beginning of the `text` of the `ToolCall` that follows them.
    """

    name: str
    text: str
    id: str = ""


@attrs.frozen
class Piece:
    """Piece of a streamed reply.

    Text for the user, or the model's `reasoning`.
    """

    text: str
    reasoning: bool = False


@attrs.frozen
class Message:
    """Message of a conversation.

    `role` is "user", "assistant" or "tool". An assistant's message may have `reasoning` and `tool_calls` beside its
    `content`; a tool's has the `name` of the tool and the `tool_call_id` of the call that it answers. A user's may have
    `images` and `audio`, which come before its content.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    tool_call_id: str = ""
    images: tuple[Picture, ...] = ()
    audio: tuple[Sound, ...] = ()

    @property
    def media(self) -> tuple[Picture | Sound, ...]:
        """Pictures and sound, which come before the content."""
        return (*self.images, *self.audio)

    def as_dict(self) -> dict[str, Any]:
        """Dictionary form as in OpenAI's API and chat templates.

        Empty fields are left out, except the content. Images and audio are the content of their files, in base64.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        for name, media in (("images", self.images), ("audio", self.audio)):
            if media:
                message[name] = [base64.b64encode(one.source).decode() for one in media]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if call.partial is None else call.partial,
                    },
                }
                for call in self.tool_calls
            ]
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message

    @classmethod
    def from_dict(cls, message: Any) -> Message:
        """Parse the form of `as_dict`. Raises InvalidRequestError for anything else."""
        try:
            calls = tuple(
                ToolCall(call["function"]["name"], {}, call["id"], given)
                if isinstance(given := call["function"]["arguments"], str)
                else ToolCall(call["function"]["name"], dict(given), call["id"])
                for call in message.get("tool_calls", ())
            )
            found = cls(
                message["role"],
                message["content"],
                message.get("reasoning_content", ""),
                calls,
                message.get("name", ""),
                message.get("tool_call_id", ""),
                tuple(map(_picture, message.get("images", ()))),
                tuple(map(_sound, message.get("audio", ()))),
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InvalidRequestError(f"not a message of a conversation: {str(message)[:80]}") from None
        texts = [found.content, found.reasoning, found.name, found.tool_call_id]
        texts += [text for call in calls for text in (call.name, call.id)]
        if found.role not in ("user", "assistant", "tool") or not all(isinstance(text, str) for text in texts):
            raise InvalidRequestError(f"not a message of a conversation: {str(message)[:80]}")
        return found


def _picture(image: str) -> Picture:
    from llamacli.media.pictures import Picture  # with NumPy, which the command line imports late

    return Picture.of(base64.b64decode(image, validate=True))


def _sound(audio: str) -> Sound:
    from llamacli.media.sound import Sound

    return Sound.of(base64.b64decode(audio, validate=True))


def checked_tools(tools: Any) -> tuple[Mapping[str, Any], ...] | None:
    """Check tools: JSON objects that describe a function each. Raises InvalidRequestError."""
    if tools is None:
        return None
    expect_type(tools, Iterable, "tools", "a sequence of tools")
    tools = tuple(tools)
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            wanted = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise InvalidRequestError(f"a tool is {wanted}, not {str(tool)[:80]}")
    return tools
