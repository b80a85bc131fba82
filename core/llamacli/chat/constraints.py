"""Grammars of replies: JSON Schemas, tool calls, and reasoning before them."""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat.codec import ChatCodec
from llamacli.chat.syntax import Channels, Spans, json_calls
from llamacli.errors import InvalidRequestError
from llamacli.sampling.schemas import close_objects
from llamacli.tokenizer import Tokenizer

_SPACE = r"/[ \r\n]{0,2}/"
_CALL_SPACE = "[ \n]?"
_MORE_CALLS = "{0,31}"
_JSON_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
_ARGUMENTS = "arguments"


@attrs.frozen
class Constraint:
    """Grammar of a reply, as fields of SamplingParams.

    All None leaves it free.
    """

    grammar: str | None = None
    json_schema: str | None = None
    triggers: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def is_free(self) -> bool:
        """True without a grammar."""
        return self.grammar is None and self.json_schema is None


FREE = Constraint()


@attrs.frozen
class ToolUse:
    """Tools that a reply may call, or must with `required`.

    One call at most unless `parallel`.
    """

    tools: Sequence[Mapping[str, Any]]
    required: bool = False
    parallel: bool = True


def completion_constraint(schema: dict[str, Any] | bool | None, grammar: str | None) -> Constraint:
    """Constraint of a text without a chat format."""
    return Constraint(grammar, None if schema is None else json.dumps(schema))


def reply_constraint(
    codec: ChatCodec, prompt: str, schema: dict[str, Any] | bool | None, grammar: str | None, tools: ToolUse | None
) -> Constraint:
    """Constraint of a chat reply to a rendered prompt.

    A JSON Schema or a GBNF grammar applies to the text for the user, after any reasoning. Tool calls
    follow their schemas from the opening marker on. Raises InvalidRequestError if calls are required in a syntax that
    has no grammar here.
    """
    syntax = codec.format.syntax
    writer: _Writer | None = None
    if isinstance(syntax, Spans):
        writer = _SpansWriter(codec, syntax, prompt)
    elif isinstance(syntax, Channels):
        writer = _ChannelsWriter(codec.tokenizer, syntax, prompt)
    if grammar is not None:
        begins = writer is None or writer.begins_at_once
        return Constraint(grammar, after=() if begins else syntax.reasoning_markers(prompt))
    calls = None if writer is None or tools is None else writer.calls(tools)
    if tools is not None and tools.required and calls is None:
        name = codec.format.name
        raise InvalidRequestError(f"tool_choice: chat format {name!r} cannot be made to call tools")
    if tools is not None and tools.required:
        assert writer is not None
        assert calls is not None
        return writer.constraint(calls)
    if schema is not None:
        if writer is None:
            return Constraint(json_schema=json.dumps(schema))
        if calls is None and writer.begins_at_once:
            return Constraint(json_schema=json.dumps(schema))
        text = writer.json_text(schema)
        return writer.constraint(text if calls is None else f"{text} | {calls}")
    if calls is not None and writer is not None:
        return writer.lazy_constraint(calls)
    return FREE


class _Writer(abc.ABC):
    """Writer of llguidance's Lark for one syntax.

    `rules` are added as they are needed.
    """

    begins_at_once = False
    triggers: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._rules: dict[str, str] = {}

    @abc.abstractmethod
    def calls(self, tools: ToolUse) -> str | None:
        """Expression of the tool calls, None if their grammar is not known."""

    @abc.abstractmethod
    def json_text(self, schema: dict[str, Any] | bool) -> str:
        """Expression of a text for the user by a JSON Schema."""

    @abc.abstractmethod
    def reasoning(self) -> str:
        """Expression of the reasoning before the text, "" for none."""

    def constraint(self, body: str) -> Constraint:
        """Constraint from the reply's beginning."""
        self._rules["body"] = body
        return self._made(f"{self.reasoning()} body".strip())

    def lazy_constraint(self, calls: str) -> Constraint:
        """Constraint from the opening marker of a tool call on."""
        return Constraint(self._made(calls).grammar, triggers=self.triggers) if self.triggers else FREE

    def marker(self, text: str) -> str:
        """Expression of a marker: its special token, or its text."""
        token = self._tokenizer.token_id(text)
        if token is not None and not self._tokenizer.piece_bytes(token):
            return f"<[{token}]>"
        return json.dumps(text)

    def until(self, name: str, closes: str) -> str:
        """Name of a rule for text up to and including a marker."""
        marker = self.marker(closes)
        if marker.startswith("<"):
            self._rules["ANY"] = r"/(.|\n)*/"
            self._rules[name] = f"ANY {marker}"
        else:
            self._rules[f"{name}[suffix={marker}]"] = r"/(.|\n)*/"
        return name

    def json(self, name: str, schema: dict[str, Any] | bool, space: str = _JSON_SPACE) -> str:
        """Name of a rule for JSON valid under a schema."""
        options = {"whitespace_pattern": space, "coerce_one_of": True}
        given = {} if schema is True else {"not": {}} if schema is False else close_objects(schema)
        self._rules[name] = f"%json {json.dumps({**given, 'x-guidance': options})}"
        return name

    def _made(self, start: str) -> Constraint:
        rules = "\n".join(f"{name}: {rule}" for name, rule in self._rules.items())
        return Constraint(f"%llguidance {{}}\nstart: {start}\n{rules}\n")


class _SpansWriter(_Writer):
    def __init__(self, codec: ChatCodec, syntax: Spans, prompt: str):
        super().__init__(codec.tokenizer)
        self._syntax = syntax
        span, end = syntax.reasoning, prompt.rstrip()
        self._is_open = span is not None and end.endswith(span.opens.rstrip())
        # A model that does not know the marker could begin with it by chance, and never come to the text.
        known = span is not None and (
            codec.tokenizer.token_id(span.opens) is not None or span.opens in codec.template.source
        )
        closed = span is not None and end.endswith(span.closes.rstrip())
        self._reasoning = span if self._is_open or (known and not closed) else None
        self.begins_at_once = self._reasoning is None
        if syntax.calls is not None and syntax.calls.opens:
            self.triggers = (syntax.calls.opens,)

    def calls(self, tools: ToolUse) -> str | None:
        syntax = self._syntax.calls
        if syntax is None or syntax.parse is not json_calls:
            return None
        rules = []
        for i, tool in enumerate(tools.tools):
            function = tool["function"]
            arguments = function.get("parameters") or {"type": "object"}
            rules.append(self.json(f"call_{i}", _call_schema(function["name"], arguments), _CALL_SPACE))
        opens = self.marker(syntax.opens) if syntax.opens else ""
        closes = self.marker(syntax.closes) if syntax.closes else ""
        self._rules["one"] = " | ".join(rules)
        more = f'({_SPACE} "," {_SPACE} one){_MORE_CALLS}' if tools.parallel else ""
        self._rules["several"] = f'one | "[" {_SPACE} one {more} {_SPACE} "]"'
        self._rules["call"] = f"{opens} {_SPACE} several {_SPACE} {closes}".strip()
        if not tools.parallel:
            return "call"
        self._rules["calls"] = f"call ({_SPACE} call){_MORE_CALLS}"
        return "calls"

    def json_text(self, schema: dict[str, Any] | bool) -> str:
        return self.json("text", schema)

    def reasoning(self) -> str:
        span = self._reasoning
        if span is None:
            return ""
        rest = self.until("thoughts", span.closes)
        if self._is_open:
            return f"{rest} {_SPACE}"
        self._rules["reasoning"] = f"{self.marker(span.opens)} {rest} {_SPACE}"
        return "reasoning?"


class _ChannelsWriter(_Writer):
    """Writer for messages with channel headers, the first begun already."""

    def __init__(self, tokenizer: Tokenizer, syntax: Channels, prompt: str):
        super().__init__(tokenizer)
        self._syntax = syntax
        self._role = prompt.rpartition(syntax.starts)[2]

    def calls(self, tools: ToolUse) -> str | None:
        alternatives = []
        for i, tool in enumerate(tools.tools):
            function = tool["function"]
            schema = function.get("parameters") or {"type": "object"}
            arguments = self.json(f"arguments_{i}", schema, _CALL_SPACE)
            to = json.dumps(f" to={self._syntax.recipient}{function['name']}")
            header = f'({to} {self._channel} "commentary" | {self._channel} "commentary" {to})'
            alternatives.append(f'{header} " "? {self._json_type} {self.marker(self._syntax.begins)} {arguments}')
        return " | ".join(alternatives)

    def json_text(self, schema: dict[str, Any] | bool) -> str:
        text = self.json("text", schema)
        return f"{self._channel} {json.dumps(self._syntax.final)} {self.marker(self._syntax.begins)} {text}"

    def reasoning(self) -> str:
        thoughts = self.until("thoughts", self._syntax.ends[0])
        begins, starts = self.marker(self._syntax.begins), self.marker(self._syntax.starts)
        self._rules["reasoning"] = f'{self._channel} "analysis" {begins} {thoughts} {starts} {json.dumps(self._role)}'
        return "reasoning?"

    @property
    def _channel(self) -> str:
        return self.marker(self._syntax.channel)

    @property
    def _json_type(self) -> str:
        """Expression of the note that the text is JSON, optional."""
        note = "<|constrain|>"
        return "" if self._tokenizer.token_id(note) is None else f'({self.marker(note)} "json")?'


def _call_schema(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """JSON Schema of a call, with its arguments under either usual key."""

    def call(key: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{_ARGUMENTS}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }

    return {"anyOf": [call("arguments"), call("parameters")], "$defs": {_ARGUMENTS: _moved(arguments)}}


def _moved(schema: Any) -> Any:
    """Copy of a schema with its references to the root moved."""
    if isinstance(schema, list):
        return [_moved(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{_ARGUMENTS}{reference[1:]}"
    return moved
