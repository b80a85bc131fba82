"""Grammars of replies: JSON Schemas, tool calls, and reasoning before them."""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat.call_text import expression
from llamacli.chat.calls import CallGrammar, JsonCall, Notation
from llamacli.chat.channels import Channels
from llamacli.chat.codec import ChatCodec
from llamacli.chat.rules import CALL_SPACE, Rules, literal
from llamacli.chat.syntax import Calls, Spans
from llamacli.errors import InvalidRequestError
from llamacli.tokenizer import Tokenizer

_SPACE = r"/[ \r\n]{0,2}/"
_MORE_CALLS = "{0,31}"


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
        return writer.constraint(writer.begun(calls), is_call=True)
    if schema is not None:
        if writer is None:
            return Constraint(json_schema=json.dumps(schema))
        if calls is None and writer.begins_at_once:
            return Constraint(json_schema=json.dumps(schema))
        text = writer.json_text(schema)
        return writer.constraint(text if calls is None else f"{text} | {writer.begun(calls)}")
    if calls is not None and writer is not None:
        return writer.lazy_constraint(calls)
    return FREE


class _Writer(abc.ABC):
    """Writer of the grammar of replies in one syntax."""

    begins_at_once = False
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
    def reasoning(self, *, is_optional: bool = False) -> str:
        """Expression of the reasoning before the text, "" for none.

        With `is_optional` reasoning that the prompt has opened may be left.
        """

    def begun(self, calls: str) -> str:
        """Expression of calls and what may come before them."""
        return f"{_SPACE} ({calls})"

    def constraint(self, body: str, *, is_call: bool = False) -> Constraint:
        """Constraint from the reply's beginning."""
        name = self.rules.add("body", body)
        return Constraint(self.rules.grammar(f"{self.reasoning(is_optional=is_call)} {name}".strip()))

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
        syntax = self._syntax.calls
        if syntax is None or (body := _body(self.rules, syntax, tools)) is None:
            return None
        calls = f"{_sections(self.rules, syntax, body, tools)} {self._markers}"
        # Without its marker, a reply is read as a call where it begins with a brace.
        return self.rules.add("bare", f"{calls} | {_SPACE} {body} {_SPACE}") if syntax.bare and syntax.opens else calls

    def json_text(self, schema: dict[str, Any] | bool) -> str:
        return self.rules.json("text", schema)

    def begun(self, calls: str) -> str:
        return f"{_SPACE} {self._markers} ({calls})"

    @property
    def _markers(self) -> str:
        markers = " | ".join(f"{self.rules.marker(text)} {_SPACE}" for text in self._syntax.dropped)
        return f"({markers})*" if markers else ""

    def reasoning(self, *, is_optional: bool = False) -> str:
        span = self._reasoning
        if span is None:
            return ""
        rest = self.rules.until(span.closes)
        if self._is_open:  # a call ends reasoning too
            return self.rules.add("reasoning", f"{rest} {_SPACE}") + ("?" if is_optional else "")
        closed = f"{self.rules.marker(span.opens)} {rest} | {self.rules.marker(span.closes)}"
        return self.rules.add("reasoning", f"{_SPACE} ({closed}) {_SPACE}") + "?"


class _ChannelsWriter(_Writer):
    """Writer for messages with channel headers, the first begun already."""

    def __init__(self, tokenizer: Tokenizer, syntax: Channels, prompt: str):
        super().__init__(tokenizer)
        self._syntax = syntax
        self._role = prompt.rpartition(syntax.starts)[2]
        self._names: list[str] = []

    def calls(self, tools: ToolUse) -> str | None:
        syntax, rules, alternatives = self._syntax, self.rules, list[str]()
        for tool in tools.tools:
            function = tool["function"]
            schema, to = function.get("parameters") or {"type": "object"}, f"{syntax.recipient}{function['name']}"
            self.triggers = (*self.triggers, to)
            if syntax.calls is None:
                text: str | None = rules.json("arguments", schema, CALL_SPACE)
            elif (text := _body(rules, syntax.calls, attrs.evolve(tools, tools=[tool]))) is None:
                return None
            else:
                text = _sections(rules, syntax.calls, text, attrs.evolve(tools, parallel=False))
            alternatives.append(f"{literal(to)} {self._channeled} {self._begins} {text}")
        one = rules.add("message", " | ".join(alternatives))
        if not tools.parallel or not syntax.names_recipient:
            return one
        return f"{one} ({expression(rules, ''.join(syntax.ends[:1]))} {self._next} {one}){_MORE_CALLS}"

    @property
    def _channeled(self) -> str:
        if self._syntax.names_recipient:
            return ""
        note = "<|constrain|>"
        known = self.rules.tokenizer.token_id(note) is not None
        kind = f'(" "? {self.rules.marker(note)} "json" | " json")?' if known else '(" json")?'
        return f'({self._channel} {literal(self._syntax.preamble)})? {kind} " "?'

    @property
    def _next(self) -> str:
        """Expression of the beginning of another message."""
        return f"{self.rules.marker(self._syntax.starts)} {literal(self._role)}" if self._role else self.rules.marker(
            self._syntax.starts
        )  # fmt: skip

    def begun(self, calls: str) -> str:
        early = "" if self._syntax.names_recipient else f"({self._channel} {literal(self._syntax.preamble)})?"
        return f"{early} ({calls})"

    def lazy_constraint(self, calls: str) -> Constraint:
        """Constraint from the header of a tool call on."""
        if self._syntax.recipient:
            self.after = self._syntax.thought_markers
            return super().lazy_constraint(calls)
        text = self.rules.add("text", r"/(.|\n)*/")
        return self.constraint(f"{calls} | {literal(self._syntax.final)} {self._begins} {text}")

    def json_text(self, schema: dict[str, Any] | bool) -> str:
        text = self.rules.json("text", schema)
        return f"{self._channel} {literal(self._syntax.final)} {self._begins} {text}"

    def reasoning(self, *, is_optional: bool = False) -> str:
        if not self._syntax.thought:
            return ""
        rest = self.rules.until(self._syntax.ends[0])
        rule = f"{self._channel} {literal(self._syntax.thought)} {self._begins} {rest} {self._next}"
        return self.rules.add("reasoning", rule) + "?"

    @property
    def _channel(self) -> str:
        return self.rules.marker(self._syntax.channel)

    @property
    def _begins(self) -> str:
        return self.rules.marker(self._syntax.begins)


def _body(rules: Rules, syntax: Calls, tools: ToolUse) -> str | None:
    """Name of a rule for one call, None without a grammar."""
    parse = syntax.parse
    write: CallGrammar | None = parse.one.grammar if isinstance(parse, Notation) else syntax.grammar
    if write is None:
        return None
    functions = [tool["function"] for tool in tools.tools]
    calls = [write(rules, each["name"], each.get("parameters") or {"type": "object"}) for each in functions]
    return rules.add("one", " | ".join(calls))


def _sections(rules: Rules, syntax: Calls, one: str, tools: ToolUse) -> str:
    parse = syntax.parse
    head, between, tail = (parse.head, parse.between, parse.tail) if isinstance(parse, Notation) else ("", None, "")
    if isinstance(parse, Notation) and isinstance(parse.one, JsonCall) and parse.one.is_by_hand:
        more = f'({_SPACE} "," {_SPACE} {one}){_MORE_CALLS}' if tools.parallel else ""
        one = f'({one} | "[" {_SPACE} {one} {more} {_SPACE} "]")'  # keys by hand: it may be a list
    elif between is not None and tools.parallel:
        one = f"{one} ({expression(rules, between)} {one}){_MORE_CALLS}"
    texts = [expression(rules, text) for text in (syntax.opens, head, tail, syntax.closes)]
    call = rules.add("call", f"{texts[0]} {texts[1] or _SPACE} {one} {texts[2] or _SPACE} {texts[3]}")
    if between is not None or not tools.parallel or not (syntax.opens or syntax.closes):
        return call
    return rules.add("calls", f"{call} ({_SPACE} {call}){_MORE_CALLS}")
