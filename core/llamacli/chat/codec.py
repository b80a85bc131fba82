"""Chat without a session: messages to prompt tokens, generated tokens to replies."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import attrs

from llamacli.chat import generic_tools
from llamacli.chat.calls import Notation, Tools
from llamacli.chat.channels import Channels
from llamacli.chat.derivation import derive, takes_tools
from llamacli.chat.formats import ChatFormat, choose, own_templates
from llamacli.chat.messages import CallDelta, Message, Piece, ToolCall
from llamacli.chat.syntax import Event, Reader, Spans, StopText, Syntax
from llamacli.chat.template import ChatTemplate, Rendering
from llamacli.errors import ChatTemplateError, InvalidRequestError, expect_type
from llamacli.gguf import Metadata
from llamacli.sampling import SamplingParams
from llamacli.tokenizer import Tokenizer

GIVEN = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""Reserved names of variables, which the chat itself passes to templates."""

_TOOL_USE = "tool_use"
"""Name of a file's separate template for conversations with tools."""

_PROBE, _NEXT = "Xyzzy", "Plugh"
_MAX_KEPT = 64
"""Number of sets of variables for which the end of a reply is remembered."""


@attrs.frozen
class ReplyEnds:
    """End tokens of a reply, and the text that ends it.

    Where `unless` comes, which begins with that text, the reply goes on.
    """

    tokens: frozenset[int]
    text: str = ""
    unless: str = ""


class ChatCodec:
    """Encoder of prompts and decoder of replies for one chat template.

    It has no conversation and no cache: `render` makes the prompt of a list of messages, `encode` its token ids, and
    `reader` parses the tokens of the reply to it. Usable from several threads at once.

    - `template`, `format`, `syntax`: the chat template, the format, and the syntax of replies.

    With `tools` a template of the file's own for tools is preferred. `template` selects another one as in
    `Model.create_chat`. Raises ChatTemplateError if there is no template, or a broken one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        metadata: Metadata,
        formats: Iterable[ChatFormat] = (),
        template: str | None = None,
        *,
        tools: bool = False,
    ):
        if template is None and tools and _TOOL_USE in own_templates(metadata):
            template = _TOOL_USE
        chosen = choose(metadata, tokenizer, formats, template)
        assert chosen.template is not None
        self.template = ChatTemplate(chosen.template, tokenizer)
        self.syntax: Syntax = chosen.syntax if chosen.syntax is not None else derive(self.template)
        self.format: ChatFormat = attrs.evolve(chosen, syntax=self.syntax)
        self.tokenizer = tokenizer
        self._ends: dict[str, ReplyEnds] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """Render messages to a prompt.

        `messages` are dictionaries in the form of OpenAI's API. `tools` are JSON objects that describe functions;
        `variables` are passed to the template, such as `documents` or `enable_thinking`.

        Tools that the template does not render are described in the system message, with a generic notation of calls,
        and a warning says so once.

        The file's BOS token is its first part if the file adds one. Raises ChatTemplateError if the template fails,
        InvalidRequestError for a reserved name among `variables`.
        """
        expect_type(variables, (Mapping, NoneType), "variables", "a mapping of names")
        variables = variables or {}
        taken = GIVEN & variables.keys()
        if taken:
            raise InvalidRequestError(f"{min(taken)!r} cannot be a variable: the chat itself passes it to the template")
        if tools and isinstance(self.syntax, Spans) and not takes_tools(self.template):
            self.syntax = generic_tools.with_calls(self.syntax)
            messages, tools = generic_tools.described(messages, tools), None
        rendering = self.template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        bos_id = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos_id is not None and list(rendering.parts[:1]) != [bos_id]:
            return attrs.evolve(rendering, parts=[bos_id, *rendering.parts])
        return rendering

    def encode(self, rendering: Rendering) -> list[int]:
        """Token ids of a rendering; messages never become special tokens."""
        parts = ([part] if isinstance(part, int) else self.template.encode(part) for part in rendering.parts)
        return list(itertools.chain.from_iterable(parts))

    def ends(self, variables: Mapping[str, Any] | None = None) -> ReplyEnds:
        """End tokens of the file, and what the template puts after messages."""
        key = json.dumps(variables or {}, sort_keys=True, default=repr)
        found = self._ends.get(key)
        if found is None:
            found = self._find_ends(variables)
            if len(self._ends) >= _MAX_KEPT:
                self._ends.clear()
            self._ends[key] = found
        return found

    def reader(
        self,
        rendering: Rendering,
        *,
        tools: Tools = False,
        variables: Mapping[str, Any] | None = None,
        n_calls: int = 0,
    ) -> ReplyReader:
        """Reader of the reply to a rendered prompt.

        Tool calls are parsed only with `tools`; their ids are numbered after the `n_calls` of the conversation so far.
        """
        parser = self.syntax.reader(rendering.prompt, tools=tools)
        parser.begin(rendering.begun)
        return ReplyReader(self, parser, self.ends(variables), n_calls)

    def reasoning_markers(self, rendering: Rendering) -> tuple[str, ...]:
        """Markers of reasoning for `SamplingParams.grammar_after`.

        With them a grammar or schema constrains the reply's text only. Empty if the format has no reasoning.
        """
        return self.syntax.reasoning_markers(rendering.prompt)

    def opens_reasoning(self, prompt: str) -> bool:
        """True if a prompt ends with the marker that opens reasoning."""
        if isinstance(self.syntax, Channels):
            return prompt.endswith(self.syntax.thought_markers[:1])
        return self.syntax.reasoning_markers(prompt)[:1] == ("",)

    def budgeted(self, params: SamplingParams, rendering: Rendering) -> SamplingParams:
        """Sampling parameters with the markers that a budget of reasoning needs."""
        return attrs.evolve(params, reasoning_markers=self.thought_markers(rendering))

    def thought_markers(self, rendering: Rendering) -> tuple[str, ...]:
        """Markers of reasoning for `SamplingParams.reasoning_markers`."""
        if isinstance(self.syntax, Channels):
            opens = self.opens_reasoning(rendering.prompt)
            return ("", *self.syntax.thought_markers[1:]) if opens else self.syntax.thought_markers
        return self.syntax.reasoning_markers(rendering.prompt)

    def spelled(self, token: int) -> str:
        """Text that a special token is read as.

        Its own if it is a marker in replies. A space for other ones, as they may stand between two words, and nothing
        for those that end the text.
        """
        if token not in self.template.structure:
            return ""
        text = self.tokenizer.token_text(token)
        if any(text in marker for marker in self.syntax.markers):
            return text
        return "" if token in self.tokenizer.eog_ids else " "

    def _is_dropped(self, part: int | str) -> bool:
        text = self.tokenizer.token_text(part) if isinstance(part, int) else part.strip()
        return any(text in marker for marker in getattr(self.syntax, "dropped", ()))

    def _find_ends(self, variables: Mapping[str, Any] | None) -> ReplyEnds:
        tokens, text = self.tokenizer.eog_ids, ""
        turn = [{"role": "user", "content": _NEXT}, {"role": "assistant", "content": _PROBE}]
        try:
            parts = self.render([*turn, turn[0]], add_generation_prompt=False, variables=variables).parts
        except ChatTemplateError:
            return ReplyEnds(tokens)
        for n, run in enumerate(parts):
            if isinstance(run, str) and _PROBE in run:
                after = next((part for part in parts[n + 1 :] if not self._is_dropped(part)), "")
                closing = run.rpartition(_PROBE)[2].partition(_NEXT)[0].strip()
                if closing:
                    text = closing.splitlines()[0]
                elif isinstance(after, int) and self.tokenizer.is_control(after):
                    calls = self.syntax.calls if isinstance(self.syntax, Spans) else None
                    if calls is not None and calls.opens == self.tokenizer.token_text(after):  # calls are a message
                        head = calls.parse.head if isinstance(calls.parse, Notation) else ""
                        return ReplyEnds(tokens - {after}, calls.opens, calls.opens + head)
                    tokens |= {after}
        return ReplyEnds(tokens, text)


class ReplyReader:
    """Incremental parser of one reply, from tokens to text and tool calls.

    `ended` is true once an end token or the end text has come: generation should stop. `n_read` is the number of
    characters that the tokens have spelled so far. What it returns does not depend on how the text is divided into
    tokens, joined pieces are the text.
    """

    def __init__(self, codec: ChatCodec, parser: Reader, ends: ReplyEnds, n_calls: int = 0):
        self._codec, self._parser, self.ends = codec, parser, ends
        self._end_text = StopText(ends.text, ends.unless)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._n_calls = n_calls
        self.ended = False
        self.n_read = 0

    def feed(self, token: int, piece: str) -> list[Event]:
        """Read a token; returns the events that are certain now.

        `piece` is the text that is complete with the token (`Token.piece`). Events are `Piece` (text or reasoning),
        `CallDelta` (text of a call's arguments) and `ToolCall` (whole, after its deltas). An end token has no events:
        call `flush` after it.
        """
        return [event for event, _ in self.locate(token, piece)]

    def flush(self) -> list[Event]:
        """Events of the text held back, at the end of the reply."""
        return [event for event, _ in self.locate_rest()]

    def locate(self, token: int, piece: str) -> list[tuple[Event, int]]:
        """Read a token as `feed` does: events with offsets.

        A `Piece` is the reply's text from its offset on.
        """
        if token in self.ends.tokens:
            self.ended = True
        if self.ended:
            return []
        text = piece or self._codec.spelled(token)
        self.n_read += len(text)
        events = self._parser.locate(self._end_text.feed(text))
        self.ended = self._end_text.found
        return self._taken(events)

    def locate_rest(self) -> list[tuple[Event, int]]:
        """Events of `flush` with offsets."""
        return self._taken([*self._parser.locate(self._end_text.flush()), *self._parser.locate("", final=True)])

    @property
    def is_empty(self) -> bool:
        """True if nothing has been read."""
        return not (self._content or self._reasoning or self._calls)

    def message(self) -> Message:
        """Message of what has been read so far."""
        return Message("assistant", "".join(self._content), "".join(self._reasoning), tuple(self._calls))

    def _taken(self, events: Iterable[tuple[Event, int]]) -> list[tuple[Event, int]]:
        taken: list[tuple[Event, int]] = []
        for event, start in events:
            if isinstance(event, Piece):
                (self._reasoning if event.reasoning else self._content).append(event.text)
            else:  # templates of some models insist on nine letters and digits
                number = self._n_calls + len(self._calls) + 1
                event = attrs.evolve(event, id=f"call{number:05d}")
                if not isinstance(event, CallDelta):
                    self._calls.append(event)
            taken.append((event, start))
        return taken
