"""Table of templates and their own calls: `python -m oracle.call_table [LLAMA_CPP]`.

Templates are those of `../shared/templates`, and of the folder of llama.cpp's sources if it is given. Each renders
conversations with calls; the replies are cut out, read back, and compared with what grammars allow.
"""

import argparse
import functools
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

from llamacli.chat import environment
from llamacli.chat.codec import ChatCodec
from llamacli.chat.constraints import ToolUse, reply_constraint
from llamacli.chat.messages import Piece, ToolCall
from llamacli.errors import ChatTemplateError, InvalidRequestError
from llamacli.plugins import Plugins
from llamacli.sampling import SamplingParams, build_chain
from llamacli.testing.chats import NOW
from oracle.chat_replies import codec_of

SHARED = Path(__file__).resolve().parents[3] / "shared/templates"
_ENDS = ("<|calls|>", "<|eom_id|>", "<|eot|>", "<|END_OF_TURN_TOKEN|>")
"""Tokens that end replies in files, which templates alone do not tell."""
USER = {"role": "user", "content": "Hi"}

Call = tuple[str, dict[str, Any]]


_ITEMS = {"array": {"items": {"type": "integer"}}}


def tools(*names: str) -> list[dict[str, Any]]:
    """Two tools: one with texts, one with values of other types."""
    texts = {"path": "string", "text": "string", "n": "integer"}
    others = {"on": "boolean", "dice": "array", "more": "object"}
    schemas = [
        {
            "type": "object",
            "properties": {
                key: {"type": kind, "description": f"The {key}.", **_ITEMS.get(kind, {})} for key, kind in kinds.items()
            },
            "required": [key for key in kinds if key == "path"],
        }
        for kinds in (texts, others)
    ]
    return [
        {"type": "function", "function": {"name": name, "description": f"It may {name}.", "parameters": schema}}
        for name, schema in zip(names, schemas, strict=True)
    ]


TOOLS = tools("save", "roll")
TEXTS = ("12345", "true", '{"a": 1}', "[1, 2]", "null", "a <b> c & 'd'", "  x\n\n y", "None", '"q"', "é ☃ \\n", "")
CALLS: dict[str, list[Call]] = {
    "one": [("save", {"path": "a b.c"})],
    "two arguments": [("save", {"path": "x", "n": -3})],
    "no arguments": [("roll", {})],
    "types": [("roll", {"on": True, "dice": [1, 2]})],
    "nested": [("roll", {"more": {"a": [1, {"b": True}], "c": "d e"}})],
    "two": [("save", {"path": "x"}), ("roll", {"on": False})],
    "the same twice": [("roll", {"on": True}), ("roll", {"on": True})],
    "three": [("save", {"path": "x"}), ("save", {"path": "y"}), ("roll", {"dice": [3]})],
    "a file": [("save", {"path": "a.py", "text": 'def f(x):\n    return {"a": "</b>"}\n'})],
    **{f"text {text!r}": [("save", {"path": text})] for text in TEXTS},
}


def rendered(
    codec: ChatCodec, calls: Sequence[Call], given: Sequence[Mapping[str, Any]] = TOOLS, **message: Any
) -> str | None:
    """Reply as the template renders it, None if it does not."""
    for content, write, as_id in itertools.product(
        ("", None), (dict, functools.partial(json.dumps, ensure_ascii=False)), ("functions.{}:{}", "abcdef{1:03}")
    ):
        made = [
            {"id": as_id.format(name, n), "type": "function", "function": {"name": name, "arguments": write(values)}}
            for n, (name, values) in enumerate(calls)
        ]
        answer = {"role": "assistant", "content": content, "tool_calls": made, **message}
        try:
            prompt = codec.render([USER], tools=given).text
            whole = codec.render([USER, answer], tools=given, add_generation_prompt=False).text
        except ChatTemplateError:
            continue
        start = len(re.sub(r"<[^<>]*$|\[[A-Z_]*$", "", _common(prompt, whole)))
        reply = _cut(codec, whole[start:], max(whole[start:].rfind(name) for name, _ in calls))
        closes = codec.syntax.reasoning_markers("")[-1:]
        if closes and prompt.endswith(closes):
            reply = reply.removeprefix(closes[0])
        if all(reply.count(name) >= [call[0] for call in calls].count(name) for name, _ in calls):
            return reply
    return None


def _common(one: str, other: str) -> str:
    """Text that both begin with."""
    pairs = zip(one, other, strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _cut(codec: ChatCodec, text: str, named: int) -> str:
    """Text of a reply up to what ends it behind a place."""
    ends = codec.ends()
    texts = [
        *(codec.tokenizer.token_text(token) for token in ends.tokens),
        ends.text,
        "<|calls|>",
        "<|eom_id|>",
        "<|eot|>",
    ]
    texts.append("<|END_OF_TURN_TOKEN|>")
    places = [text.find(end, named) for end in texts if end]
    return text[: min((place for place in places if place >= 0), default=len(text))].rstrip("\n")


def read(
    codec: ChatCodec, pieces: Sequence[str], given: Sequence[Mapping[str, Any]] = TOOLS
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and calls of a reply, cut arguments as text."""
    reader = codec.syntax.reader(codec.render([USER], tools=given).text, tools=given)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.flush()
    return (
        "".join(event.text for event in events if isinstance(event, Piece) and not event.reasoning),
        "".join(event.text for event in events if isinstance(event, Piece) and event.reasoning),
        [
            (event.name, event.arguments if event.partial is None else event.partial)
            for event in events
            if isinstance(event, ToolCall)
        ],
    )


def allows(codec: ChatCodec, text: str, given: Sequence[Mapping[str, Any]] = TOOLS, *, required: bool) -> bool:
    """True if a request's grammar allows a text, and its end there."""
    prompt = codec.render([USER], tools=given).text
    try:
        made = reply_constraint(codec, prompt, None, None, ToolUse(given, required=required))
    except InvalidRequestError:
        return False
    params = SamplingParams(grammar=made.grammar, grammar_triggers=made.triggers, grammar_after=made.after)
    chain = build_chain(params, codec.tokenizer)
    tokens: list[int] = []
    for part in codec.tokenizer.split(text, codec.template.structure):
        tokens += [part] if isinstance(part, int) else codec.template.encode(part, True)
    try:
        for token in [*tokens, min(codec.tokenizer.eog_ids)]:
            chain.accept(token)
    except InvalidRequestError:
        return False
    return True


def is_constrained(codec: ChatCodec) -> bool:
    """True if calls follow a grammar without `required` too."""
    made = reply_constraint(codec, codec.render([USER], tools=TOOLS).text, None, None, ToolUse(TOOLS))
    return not made.is_free


@attrs.define
class Row:
    """Calls that a template renders, and what is wrong with them."""

    n: int = 0
    unread: list[str] = attrs.Factory(list)
    not_required: list[str] = attrs.Factory(list)
    not_auto: list[str] = attrs.Factory(list)
    is_free: bool = False
    is_generic: bool = False


@mock.patch.object(environment, "now", new=mock.Mock(return_value=NOW))  # renderings are compared to the second
def row(codec: ChatCodec) -> Row:
    """Row of one template, without calls if it renders none."""
    found = Row()
    for kind, calls in CALLS.items():
        reply = rendered(codec, calls)
        if reply is None:
            continue
        found.n += 1
        parts = [read(codec, [reply]), read(codec, list(reply))]
        if parts[0] != parts[1] or parts[0][2] != calls or parts[0][0].strip():
            found.unread.append(kind)
        if not allows(codec, reply, required=True):
            found.not_required.append(kind)
        if not allows(codec, reply, required=False):
            found.not_auto.append(kind)
    found.is_generic = not codec.template.takes_tools()
    found.is_free = found.n > 0 and not is_constrained(codec)
    return found


@functools.cache
def templates(folder: Path | None) -> dict[str, Path]:
    """Real templates by name: those that are here, and llama.cpp's."""
    paths = [*SHARED.glob("*.jinja"), *((folder / "models/templates").glob("*.jinja") if folder else ())]
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="sources of llama.cpp")
    parser.add_argument("-v", action="store_true", help="print the kinds of calls that fail, and their texts")
    parser.add_argument("-k", default="", help="only templates with this in their names")
    options = parser.parse_args()
    plugins, rows = Plugins(), dict[str, Row]()
    for name, path in templates(options.folder).items():
        if options.k not in name:
            continue
        codec = codec_of(path, plugins)
        found = row(codec)
        if not found.n:
            continue
        rows[name] = found
        marks = ["generic"] if found.is_generic else []
        for name_of, failed in (("read", found.unread), ("required", found.not_required), ("auto", found.not_auto)):
            listed = ", ".join(failed) if len(failed) < found.n else "all"
            marks.append(f"NOT {name_of}: {listed}" if failed else name_of)
        marks += ["auto is free"] if found.is_free else []
        print(f"{name}: {found.n} calls; " + "; ".join(marks))
        if options.v:
            for kind in sorted({*found.unread, *found.not_required, *found.not_auto}):
                reply = rendered(codec, CALLS[kind])
                print(f"  {kind}: {reply!r}\n    {read(codec, [reply or ''])}")
        sys.stdout.flush()
    of_calls = [found for found in rows.values() if not found.is_generic]
    n_read, n_required = sum(not found.unread for found in of_calls), sum(not found.not_required for found in of_calls)
    n_auto = sum(not found.not_auto and not found.is_free for found in of_calls)
    print(f"{len(of_calls)} templates render calls: {n_read} are read, {n_required} required, {n_auto} auto")
    print(f"{len(rows) - len(of_calls)} other templates have the generic notation")


if __name__ == "__main__":
    main()
