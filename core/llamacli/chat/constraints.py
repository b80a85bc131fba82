"""Grammars of replies: JSON Schemas, tool calls, and reasoning before them."""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat.calls import Notation, expression, json_calls, moved
from llamacli.chat.codec import ChatCodec
from llamacli.chat.rules import CALL_SPACE, Rules, literal
from llamacli.chat.syntax import Calls, Channels, Spans
from llamacli.errors import InvalidRequestError
from llamacli.tokenizer import Tokenizer

_SPACE = r"/[ \r\n]{0,2}/"
_MORE_CALLS = "{0,31}"
_ARGUMENTS = "arguments"


@attrs.frozen
class Constraint:
    """Grammar of a reply, as fields of SamplingParams.

    All None leaves it free. `markers` are those of reasoning, for a budget.
    """

    grammar: str | None = None
    json_schema: str | None = None
    triggers: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()

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
    syntax = codec.syntax
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
        return writer.constraint(calls if writer.begins_with_header else f"{_SPACE} {calls}")
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
    """Writer of the grammar of replies in one syntax."""

    begins_at_once = begins_with_header = False
    triggers: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer):
        self.rules = Rules(tokenizer)

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
        name = self.rules.add("body", body)
        return Constraint(self.rules.grammar(f"{self.reasoning()} {name}".strip()))

    def lazy_constraint(self, calls: str) -> Constraint:
        """Constraint from the opening marker of a tool call on."""
        return Constraint(self.rules.grammar(calls), None, self.triggers, self.after) if self.triggers else FREE


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
        if self._reasoning is not None:
            self.after = syntax.reasoning_markers(prompt)
        if syntax.calls is not None and syntax.calls.opens:
            self.triggers = (syntax.calls.opens,)

    def calls(self, tools: ToolUse) -> str | None:
        syntax, rules = self._syntax.calls, self.rules
        if syntax is None or (syntax.grammar is None and syntax.parse is not json_calls):
            return None
        if syntax.notation is not None:
            return self._noted(syntax, syntax.notation, tools)
        opens = rules.marker(syntax.opens) if syntax.opens else ""
        closes = rules.marker(syntax.closes) if syntax.closes else ""
        space = _SPACE if syntax.grammar is None else ""
        one, body = self._json_body(tools) if syntax.grammar is None else ("", self._body(syntax, tools))
        call = rules.add("call", " ".join(filter(None, (opens, space, body, space, closes))))
        calls = rules.add("calls", f"{call} ({space} {call}){_MORE_CALLS}") if tools.parallel else call
        # Without its marker, a reply is read as a call where it begins with a brace.
        return rules.add("bare", f"{calls} | {space} {one} {space}") if syntax.bare and opens and one else calls

    def _noted(self, syntax: Calls, notation: Notation, tools: ToolUse) -> str:
        """Expression of calls as the template writes them."""
        rules, one = self.rules, self._body(syntax, tools)
        between = notation.between
        if between is not None and tools.parallel:
            one = f"{one} ({expression(rules, between)} {one}){_MORE_CALLS}"
        texts = [expression(rules, text) for text in (syntax.opens, notation.head, notation.tail, syntax.closes)]
        call = rules.add("call", f"{texts[0]} {texts[1]} {one} {texts[2]} {texts[3]}")
        more = between is None and tools.parallel
        return rules.add("calls", f"{call} ({_SPACE} {call}){_MORE_CALLS}") if more else call

    def _body(self, syntax: Calls, tools: ToolUse) -> str:
        """Name of a rule for one call in the syntax's own notation."""
        assert syntax.grammar is not None
        functions = [tool["function"] for tool in tools.tools]
        calls = [
            syntax.grammar(self.rules, function["name"], function.get("parameters") or {"type": "object"})
            for function in functions
        ]
        return self.rules.add("one", " | ".join(calls))

    def _json_body(self, tools: ToolUse) -> tuple[str, str]:
        """Names of the rules for one call in JSON, and for several."""
        calls = []
        for tool in tools.tools:
            function = tool["function"]
            schema = _call_schema(function["name"], function.get("parameters") or {"type": "object"})
            calls.append(self.rules.json("json_call", schema, CALL_SPACE))
        one = self.rules.add("one", " | ".join(calls))
        more = f'({_SPACE} "," {_SPACE} {one}){_MORE_CALLS}' if tools.parallel else ""
        return one, self.rules.add("several", f'{one} | "[" {_SPACE} {one} {more} {_SPACE} "]"')

    def json_text(self, schema: dict[str, Any] | bool) -> str:
        return self.rules.json("text", schema)

    def reasoning(self) -> str:
        span = self._reasoning
        if span is None:
            return ""
        rest = self.rules.until(span.closes)
        if self._is_open:
            return f"{rest} {_SPACE}"
        return self.rules.add("reasoning", f"{_SPACE} {self.rules.marker(span.opens)} {rest} {_SPACE}") + "?"


class _ChannelsWriter(_Writer):
    """Writer for messages with channel headers, the first begun already."""

    begins_with_header = True

    def __init__(self, tokenizer: Tokenizer, syntax: Channels, prompt: str):
        super().__init__(tokenizer)
        self._syntax = syntax
        self._role = prompt.rpartition(syntax.starts)[2]

    def calls(self, tools: ToolUse) -> str | None:
        alternatives = []
        for tool in tools.tools:
            function = tool["function"]
            schema = function.get("parameters") or {"type": "object"}
            arguments = self.rules.json("arguments", schema, CALL_SPACE)
            to = literal(f" to={self._syntax.recipient}{function['name']}")
            header = f'({to} {self._channel} "commentary" | {self._channel} "commentary" {to})'
            alternatives.append(f'{header} " "? {self._json_type} {self._begins} {arguments}')
        return " | ".join(alternatives)

    def json_text(self, schema: dict[str, Any] | bool) -> str:
        text = self.rules.json("text", schema)
        return f"{self._channel} {literal(self._syntax.final)} {self._begins} {text}"

    def reasoning(self) -> str:
        rest, starts = self.rules.until(self._syntax.ends[0]), self.rules.marker(self._syntax.starts)
        rule = f"{self._channel} {literal(self._syntax.thought)} {self._begins} {rest} {starts} {literal(self._role)}"
        return self.rules.add("reasoning", rule) + "?"

    @property
    def _channel(self) -> str:
        return self.rules.marker(self._syntax.channel)

    @property
    def _begins(self) -> str:
        return self.rules.marker(self._syntax.begins)

    @property
    def _json_type(self) -> str:
        """Expression of the note that the text is JSON, optional."""
        note = "<|constrain|>"
        return "" if self.rules.tokenizer.token_id(note) is None else f'({self.rules.marker(note)} "json")?'


def _call_schema(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """JSON Schema of a call, with its arguments under either usual key."""

    def call(key: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{_ARGUMENTS}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }

    return {"anyOf": [call("arguments"), call("parameters")], "$defs": {_ARGUMENTS: moved(arguments)}}
