"""Syntax of replies derived from a chat template.

Probe conversations are rendered: with and without reasoning, with text and with calls, one and two of them, with one
and two arguments. The markers are the texts in which the renderings differ. A notation is kept only if it parses the
probes.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from llamacli.chat.call_text import ID
from llamacli.chat.calls import JsonCall, NamedCall, Notation, OneCall
from llamacli.chat.channels import Channels
from llamacli.chat.environment import clock_held
from llamacli.chat.literals import JSON, PYTHON
from llamacli.chat.messages import Piece, ToolCall
from llamacli.chat.syntax import HERMES, THINK, Calls, Span, Spans
from llamacli.chat.tags import KEY, Pairs
from llamacli.chat.template import ChatTemplate
from llamacli.errors import ChatTemplateError
from llamacli.tokenizer import Tokenizer

_TEXT, _THOUGHT = "Xyzzy", "Plugh"
_NAMES, _KEYS, _VALUES = ("fn_plover", "fn_quux"), ("key_one", "key_two"), ("Foobar", "Bazqux")
_FIRST, _SECOND = ((name, {_KEYS[0]: value}) for name, value in zip(_NAMES, _VALUES, strict=True))
_BOTH = (_NAMES[0], dict(zip(_KEYS, _VALUES, strict=True)))
_MARKED = "<Fee> & <fie>"
_TYPED: dict[str, Any] = {"key_one": 7, "key_two": True, "key_three": {"a": [1, None]}}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Nothing.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "Nothing."} for key in _KEYS},
                "required": [_KEYS[0]],
            },
        },
    }
    for name in _NAMES
]
_USER = {"role": "user", "content": "Frobnicate."}
_PREFIX = r"(?:\]<\]\w+\[>\[)?"
"""Regular expression of a marker before each tag, which some templates have."""
_NAMED = r"<\|\w+\|>\w+<\|\w+\|>"
"""Regular expression of a marker whose name is a word between two special tokens."""
_WORDS = r"\[/?[A-Z_]+(?: [A-Z_]+)*\]"
"""Regular expression of a marker of words in brackets."""
_TOKEN = re.compile(rf"{_NAMED}|{_PREFIX}<[^<>\s][^<>]*(?:>|$)|{_WORDS}|\s|\w+|.", re.DOTALL)
_MARKER = re.compile(rf"{_NAMED}|{_PREFIX}<[^<>\s][^<>]*>?|{_WORDS}")
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"))
"""Markers of reasoning in templates that do not render it."""

_OTHER_CALLS = re.compile("<function=|<arg_key>")
"""Texts of templates whose calls between `<tool_call>` are not JSON."""


_MAX_KEPT = 32
"""Number of properties of templates that are remembered for a vocabulary."""

_found: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[str, str], Any]] = weakref.WeakKeyDictionary()
_log = logging.getLogger(__name__)

T = TypeVar("T")


def derive(template: ChatTemplate) -> Spans | Channels:
    """Derive the syntax of replies from a template, once for each vocabulary.

    What its renderings do not show is not in the result: no calls, or no reasoning. Derived again where a rendering
    took too long.
    """
    return _once("syntax", template, _derive)


def takes_tools(template: ChatTemplate) -> bool:
    """True if the template renders tools or calls; warns once if not."""
    return _once("tools", template, _takes_tools)


def _takes_tools(template: ChatTemplate) -> bool:
    found = template.takes_tools()
    if not found:
        _log.warning("the chat template does not support tools: the system message describes them")
    return found


def _once(what: str, template: ChatTemplate, find: Callable[[ChatTemplate], T]) -> T:
    kept, key = _found.setdefault(template.tokenizer, {}), (what, template.source)
    found = kept.get(key)
    if found is None:
        with clock_held():
            found = find(template)
        if len(kept) >= _MAX_KEPT:
            kept.clear()
        if not template.hit_limit:  # which depends on what else the machine does
            kept[key] = found
    result: T = found
    return result


def _derive(template: ChatTemplate) -> Spans | Channels:
    probe = _Probe(template)
    channels = next(filter(None, (_channels(probe, variant) for variant in _variants())), None)
    if channels is not None:
        return channels
    reasoning, dropped = probe.reasoning()
    found = next(filter(None, (_calls(probe, variant, reasoning, dropped) for variant in _variants())), None)
    calls, behind = found or (None, ())
    described = any(text in template.source for text in ("<tool_call>", "<|im_start|>"))
    if calls is None and described and not _OTHER_CALLS.search(template.source):
        reasoning, calls = reasoning or THINK, HERMES.calls  # described in the prompt only
    if calls is not None and reasoning is not None:
        dropped = tuple(text for text in dropped if text not in (calls.opens, calls.closes))
    dropped = tuple(dict.fromkeys([*dropped, *behind]))
    return Spans(reasoning, calls, dropped)


@attrs.frozen
class _Variant:
    """Form of calls in messages: null content, arguments as text, ids."""

    content: str | None
    as_text: bool
    ids: tuple[str, str]

    def calls(self, *calls: tuple[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Calls of a message."""
        return [
            {
                "id": number,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given) if self.as_text else dict(given)},
            }
            for number, (name, given) in zip(self.ids, calls, strict=False)
        ]


def _variants() -> Iterator[_Variant]:
    numbered = tuple(f"functions.{name}:{n}" for n, name in enumerate(_NAMES))
    for ids, as_text, content in itertools.product((("abcdef123", "abcdef456"), numbered), (False, True), ("", None)):
        yield _Variant(content, as_text, ids)  # type: ignore[arg-type]


class _Probe:
    """Renderings of an assistant's message by a template."""

    def __init__(self, template: ChatTemplate):
        self.template = template
        self._rendered: dict[str, str] = {}
        self.ends = {text for text in template.end_texts() if text}

    def reply(self, **message: Any) -> str | None:
        """Rendering of the message without the prompt; None if it fails."""
        whole = self._render([_USER, {"role": "assistant", **message}])
        before = self._render([_USER])
        if whole is None or before is None:
            return None
        if before == self._render([_USER], True):  # the template writes the generation prompt in any case
            whole = whole.removesuffix(before.rpartition(_USER["content"])[2])
        return whole[_common(before, whole) :]

    @functools.cached_property
    def prompting(self) -> str:
        """Text that the generation prompt adds."""
        return (self._render([_USER], True) or "").removeprefix(self._render([_USER]) or "")

    @functools.cached_property
    def plain(self) -> str:
        """Rendering of a message with text alone."""
        return self.reply(content=_TEXT) or ""

    def body(self, rendered: str, reasoning: Span | None) -> str:
        """Calls of a rendering, without the markers around messages."""
        n_begun = len(self.prompting) if rendered.startswith(self.prompting) else 0
        rendered, plain = rendered[n_begun:], self.plain[n_begun:]
        start = _common(plain, rendered)
        end = _common(plain[::-1].partition(_TEXT[::-1])[0][::-1], rendered, -1)
        text = rendered[start : len(rendered) - end]
        ends = self.ends | set(_MARKER.findall(plain.partition(_TEXT)[2])[-1:])
        named = max(map(text.rfind, _NAMES))
        text = text[: min((at for end in ends if (at := text.find(end, max(named, 0))) >= 0), default=len(text))]
        if reasoning is not None:
            text = re.sub(rf"^\s*(?:{re.escape(reasoning.opens)})?\s*{re.escape(reasoning.closes)}", "", text)
        return text

    def reasoning(self) -> tuple[Span | None, tuple[str, ...]]:
        """Markers of reasoning, and markers around the text for the user."""
        rendered = self.reply(content=_TEXT, reasoning_content=_THOUGHT) or ""
        opening, _, ending = self.plain.removeprefix(self.prompting).partition(_TEXT)
        around = opening[_common(opening, self.prompting) :]
        span = None
        if 0 <= rendered.find(_THOUGHT) < rendered.find(_TEXT):
            head, _, rest = rendered.partition(_THOUGHT)
            closes = _MARKER.findall(rest.partition(_TEXT)[0])
            opens = [text for text in _MARKER.findall(head) if head.rstrip().endswith(text)]
            same = _common(head, self.prompting)
            begun = self.prompting[same:].strip()
            if begun and not head[same:].strip() and begun not in closes:  # the prompt opens it, by any text
                opens = [begun]
            if opens and closes:
                span = Span(opens[-1], closes[0])
                around += "".join(closes[1:])
        if span is None:
            source = self.template.source
            known = [Span(*pair) for pair in _REASONING if any(text in source for text in pair)]
            span = known[0] if known else THINK if "<|im_start|>" in source else None
        ending_of_user = (self._render([_USER], True) or "").rpartition(_USER["content"])[2]
        markers = [text for text in _MARKER.findall(around) if text not in ending_of_user]
        markers = [text for text in markers if span is None or text not in (span.opens, span.closes)]
        if markers:
            markers += _MARKER.findall(ending)[:-1]  # the last one ends the message
        return span, tuple(dict.fromkeys(markers))

    def _render(self, messages: Sequence[Mapping[str, Any]], prompting: bool = False) -> str | None:
        key = json.dumps([messages, prompting])
        if key not in self._rendered:
            try:
                found = self.template.render(messages, tools=_TOOLS, add_generation_prompt=prompting).text
            except ChatTemplateError:
                try:
                    found = self.template.render(messages, add_generation_prompt=prompting).text
                except ChatTemplateError:
                    found = ""
            self._rendered[key] = found
        return self._rendered[key] or None


def _calls(
    probe: _Probe, variant: _Variant, reasoning: Span | None, dropped: Sequence[str]
) -> tuple[Calls, tuple[str, ...]] | None:
    """Notation of calls in messages of one form, and markers behind several."""

    def body(*calls: tuple[str, Mapping[str, Any]]) -> str:
        rendered = probe.reply(content=variant.content, tool_calls=variant.calls(*calls))
        if rendered is None or calls[0][0] not in rendered:
            return ""
        text = probe.body(rendered, reasoning)
        while marker := next((each for each in dropped if text.lstrip().startswith(each)), ""):
            text = text.lstrip().removeprefix(marker)
        for given in variant.ids:  # the number alone where the id has the name
            text = text.replace(given, re.sub(r"(?<=:)\d+|^\w+$", ID, given))
        return text

    one = body(_FIRST)
    if not one or _KEYS[0] not in one:
        return None
    both = body(_BOTH)
    typed, none, two = body((_NAMES[0], _TYPED)), body((_NAMES[0], {})), body(_FIRST, _SECOND)
    calls = _json_calls(one, two) or _named_calls(one, two, both, typed, body((_NAMES[0], {_KEYS[0]: _MARKED})))
    if calls is None:
        return None
    expected = [(one, [_FIRST]), (two, [_FIRST, _SECOND]), (both, [_BOTH])]
    expected += [(typed, [(_NAMES[0], _TYPED)]), (none, [(_NAMES[0], {})])]
    for n, (text, wanted) in enumerate(expected):
        if (not n or text) and _read(calls, text, n == 3)[0] != wanted and n in (0, 2):
            return None
    return calls, tuple(_MARKER.findall(_read(calls, two, False)[1]))


def _channels(probe: _Probe, variant: _Variant) -> Channels | None:
    """Messages with headers that name a recipient, None for others."""

    def message(*calls: tuple[str, Mapping[str, Any]], **given: Any) -> str:
        made = {"content": variant.content, "tool_calls": variant.calls(*calls)} if calls else given
        return (probe.reply(**made) or "").removeprefix(probe.prompting)

    text = message(content=_TEXT)
    plain_at = text.find(_TEXT)
    call = message(_FIRST) if plain_at > 0 else ""
    name_at = call.find(_NAMES[0])
    recipient, rest = call[: max(name_at, 0)], call[name_at + len(_NAMES[0]) :]
    final = re.match(r"\w+", text[len(recipient) :]) if text.startswith(recipient) else None
    begins = text[len(recipient) + final.end() : plain_at] if final else ""
    if name_at < 0 or final is None or not begins or not rest.startswith(begins):
        return None
    body, two = rest[len(begins) :], message(_FIRST, _SECOND)
    between = two[len(recipient) + len(_NAMES[0]) : two.find(_NAMES[1])]
    end = body[: _common(body, between.removeprefix(begins))]
    between = between.removeprefix(begins)[len(end) :].removesuffix(recipient)
    starts = between[len(between) - _common(between, probe.prompting, -1) :]
    ends = (between.removesuffix(starts), text[plain_at + len(_TEXT) :])
    thought = message(content=_TEXT, reasoning_content=_THOUGHT).removeprefix(recipient).partition(begins + _THOUGHT)
    given = (_BOTH, (_NAMES[0], _TYPED), (_NAMES[0], {_KEYS[0]: _MARKED}))
    bodies = [message(each).partition(begins)[2] for each in given]
    calls = None if end.startswith("{") else _named_calls(end, "", *bodies)
    if not starts:
        return None
    return Channels(
        starts,
        recipient,
        begins,
        tuple(filter(None, ends)) if ends[0] else (),
        final[0],
        recipient,
        thought=thought[0] if thought[1] and thought[0].isalnum() else "",
        calls=calls,
    )


def _read(calls: Calls, text: str, typed: bool) -> tuple[list[tuple[str, Any]], str]:
    """Calls of a rendering as a reader parses them, and other text."""
    reader = Spans(calls=calls).reader("", tools=typed or _TOOLS)
    events = [*reader.feed(text.replace(ID, "0")), *reader.flush()]
    made = [(event.name, event.arguments) for event in events if isinstance(event, ToolCall) and event.partial is None]
    return made, "".join(event.text for event in events if isinstance(event, Piece))


def _json_calls(one: str, two: str) -> Calls | None:
    found = _json_call(one, 0, _NAMES[0])
    if found is None:
        return None
    start, end, call = found
    other = _json_call(two, end, _NAMES[1]) if two.startswith(one[:end]) else None
    return _section(call, one[:start], one[end:], two[end : other[0]] if other else None)


def _json_call(text: str, start: int, name: str) -> tuple[int, int, JsonCall] | None:
    decoder = json.JSONDecoder()
    for brace in (found.start() for found in re.finditer(r"\{", text[: text.find(name) if name in text else 0])):
        if brace < start:
            continue
        try:
            value, end = decoder.raw_decode(text, brace)
        except ValueError:
            continue
        wrapper = next((key for key in value if isinstance(value[key], dict) and name in value[key].values()), "")
        inner = value[wrapper] if wrapper else value
        if not wrapper and name in value and len(value) == 1:
            return brace, end, JsonCall("", "")
        names = [key for key in inner if inner[key] == name]
        arguments = [key for key in inner if _KEYS[0] in (inner[key] if isinstance(inner[key], dict) else ())]
        arguments += [key for key in inner if isinstance(inner[key], str) and inner[key].startswith("{")]
        if names and arguments:
            special = (names[0], arguments[0])
            keys = [(key, "" if key in special or ID in str(inner[key]) else inner[key]) for key in inner]
            is_id = {key for key in inner if re.fullmatch(rf"{ID}|\d+", str(inner[key]))}
            fixed = tuple((key, "" if key in is_id else value) for key, value in keys)
            return brace, end, JsonCall(names[0], arguments[0], fixed, wrapper)
    return None


def _named_calls(one: str, two: str, both: str, typed: str, marked: str) -> Calls | None:
    start = one.find(_NAMES[0])
    after = start + len(_NAMES[0])
    brace = one.find("{", after)
    try:
        value, end = json.JSONDecoder().raw_decode(one, brace) if brace >= 0 else (None, 0)
    except ValueError:
        value, end = None, 0
    if value == {_KEYS[0]: _VALUES[0]}:
        call = NamedCall(after=one[after:brace])
    else:
        found = _pairs(one, both, typed, marked, after)
        if found is None:
            return None
        call, end = found
    place = two.find(_NAMES[1]) if two.startswith(one[:end]) else -1
    if place >= 0:  # calls that are numbered
        texts = [call.after, two[place + len(_NAMES[1]) :][: len(call.after)]]
        numbered = [re.sub(r"\d+", ID, text) for text in texts]
        if texts[0] != texts[1] and numbered[0] == numbered[1]:
            call = attrs.evolve(call, after=numbered[0])
    return _section(call, one[:start], one[end:], two[end:place] if place >= 0 else None)


def _pairs(one: str, both: str, typed: str, marked: str, after: int) -> tuple[NamedCall, int] | None:
    """Call with arguments in tags, and the place after its last argument."""
    key, value = one.find(_KEYS[0], after), one.find(_VALUES[0], after)
    next_key, next_value = both.find(_KEYS[1], after), both.find(_VALUES[1], after)
    if not after < key < value or not value < next_key < next_value or not both.startswith(one[: value + 1]):
        return None
    before, middle, rest = one[after:key], one[key + len(_KEYS[0]) : value], one[value + len(_VALUES[0]) :]
    separator = both[value + len(_VALUES[0]) : next_key]
    closes = rest[: _common(rest, separator)]
    n_opens = min(_common(before, separator, -1), len(separator) - len(closes))
    opens = separator[len(separator) - n_opens :]
    between = separator[len(closes) : len(separator) - n_opens]
    other, values = (middle, closes), JSON
    place = typed.find("7", typed.find(_KEYS[0], after))
    if place >= 0:
        other_middle = typed[typed.find(_KEYS[0], after) + len(_KEYS[0]) : place]
        follows = typed[place + 1 : typed.find(_KEYS[1], place)]
        other = other_middle, follows[: len(follows) - len(opens) - len(between)] if len(follows) >= n_opens else closes
        values = PYTHON if "True" in typed else JSON
        at = typed.find(_KEYS[1], place) + len(_KEYS[1])
        other_middle = _varying(other_middle, typed[at : at + typed[at:].lower().find("true")])
        other = other_middle, other[1]
    place = marked.find(_MARKED)
    around = marked[len(one[:value]) : place], marked[place + len(_MARKED) :].partition(closes)[0]
    quoted = around if marked.startswith(one[:value]) and place > value and closes.strip() and all(around) else ("", "")
    texts = [(first, last.replace(_KEYS[0], KEY)) for first, last in ((middle, closes), other)]
    pairs = Pairs(opens, texts[0], texts[1], between, values, quoted)
    return NamedCall(after=before[: len(before) - n_opens], arguments=pairs), value + len(_VALUES[0]) + len(closes)


def _varying(one: str, other: str) -> str:
    words, others = _TOKEN.findall(one), _TOKEN.findall(other)
    differ = [n for n, pair in enumerate(zip(words, others, strict=False)) if pair[0] != pair[1]]
    if len(words) != len(others) or len(differ) != 1 or not words[differ[0]].isalnum():
        return one
    return "".join([*words[: differ[0]], ID, *words[differ[0] + 1 :]])


def _section(call: OneCall, prefix: str, suffix: str, between: str | None) -> Calls:
    ends = ""
    if between is not None:
        closes = suffix[: _common(suffix, between)]
        n_opens = min(_common(prefix, between, -1), len(between) - len(closes))
        is_whole = not prefix[: len(prefix) - n_opens].strip() and not suffix[len(closes) :].strip()
        if is_whole and closes.strip() and not between[len(closes) : len(between) - n_opens].strip():
            between = None
        else:
            ends, suffix, between = closes, suffix[len(closes) :], between[len(closes) :]
    opening = prefix.lstrip()
    found = _MARKER.match(opening)
    word = re.match(r"[^\s{\[]*", opening)
    opens = found[0] if found else opening.rstrip() if isinstance(call, NamedCall) else word[0] if word else ""
    head = opening[len(opens) :]
    last = list(_MARKER.finditer(suffix))
    is_last = bool(last) and not suffix[last[-1].end() :].strip()
    closing = last[-1][0] if is_last else ""
    tail = suffix[: last[-1].start()] if is_last else suffix
    if isinstance(call, NamedCall):
        call = attrs.evolve(call, ends=ends if between is not None else tail)
        if between is None:
            tail = ""
    elif between is not None:
        between, tail = ends + between, ends + tail
    notation = Notation(call, head, between, tail)
    texts = " ".join([head, between or "", tail, *_texts(call)])
    inner = tuple(dict.fromkeys(text for text in _MARKER.findall(texts) if text not in (opens, closing)))
    short = next(iter(_MARKER.findall(head)), "") if isinstance(call, NamedCall) else ""
    return Calls(opens, closing, notation, not opens, inner, None, short if ID not in short else "")


def _texts(call: OneCall) -> Iterator[str]:
    if isinstance(call, NamedCall):
        yield from (call.before, call.after, call.ends)
        if isinstance(call.arguments, Pairs):
            yield from (call.arguments.opens, *call.arguments.string, *call.arguments.other, call.arguments.between)


def _common(one: str, other: str, step: int = 1) -> int:
    """Length of the common first tokens, with step -1 last tokens."""
    pairs = zip(_TOKEN.findall(one)[::step], _TOKEN.findall(other)[::step], strict=False)
    return sum(len(token) for token, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
