"""Compare chat templates with those of transformers: `python -m oracle.compare_templates FOLDER`.

It needs an interpreter that has transformers. Every template of the folder renders the same conversations with both:
those of `llamacli.testing.chats`, and random ones. The special tokens that a template spells are in the vocabulary, and
texts of messages spell them too. Prints counts by kind, and an example of each template and kind.
"""

import argparse
import collections
import json
import random
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import chat_template_utils

from llamacli import ChatTemplateError
from llamacli.chat import environment
from llamacli.chat.template import ChatTemplate
from llamacli.testing.chats import CASES, NOW, TOOLS
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata

TEXTS = [
    "Hi", " spaced \n", "", "<|im_end|>", "</think> x <think>", "a\nb\n\n", "日本 é", "{{x}} {% y %}",
    "[INST] x [/INST]", "O'Brien \"q\" \\", "<tool_call>{}</tool_call>",
]  # fmt: skip
_PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": ["string", "null"], "description": "x", "enum": ["p", "q"]},
        "b": {"type": "array", "items": {"type": "object", "properties": {"z": {"type": "number"}}}},
        "c": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    },
    "required": ["a"],
}
_FUNCTION = {"name": "f", "description": 'D"é <|im_end|>', "parameters": _PARAMETERS, "return": {"type": "string"}}
_TOOL = {"type": "function", "function": _FUNCTION}
_SPECIAL = re.compile(r"<[|｜][^<>\n]{1,40}[|｜]>|<[a-z_/0-9]+>|\[/?[A-Z_]+\]|<\|?[a-z]+\|?>")


def _call(name: str, arguments: dict[str, Any], number: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(chance: random.Random) -> dict[str, Any]:
    """Random arguments of `ChatTemplate.render`."""

    def text() -> str:
        return chance.choice(TEXTS)

    def content() -> Any:
        return text() if chance.random() < 0.9 else [{"type": "text", "text": text()}]

    messages: list[dict[str, Any]] = []
    if chance.random() < 0.4:
        messages.append({"role": "system", "content": content()})
    for _ in range(chance.randint(1, 3)):
        messages.append({"role": "user", "content": content()})
        thoughts = {"reasoning_content": text()} if chance.random() < 0.3 else {}
        kind = chance.random()
        if kind < 0.3:
            calls = [_call("f", {"a": "x<b>", "n": [1, 2.5, None, True]}, "abcdef123")]
            calls += [_call("g", {}, "abcdef124")] if chance.random() < 0.3 else []
            answer = {"content": chance.choice(["", None, "Wait."]), "tool_calls": calls}
            if chance.random() < 0.1:
                del answer["content"]
            messages.append({"role": "assistant", **answer, **thoughts})
            messages += [
                {"role": "tool", "content": text(), "name": call["function"]["name"], "tool_call_id": call["id"]}
                for call in calls
            ]
            if chance.random() < 0.6:
                messages.append({"role": "assistant", "content": text()})
        elif kind < 0.8:
            messages.append({"role": "assistant", "content": text(), **thoughts})
    if messages[-1]["role"] == "assistant" and chance.random() < 0.6:
        messages.append({"role": "user", "content": text()})
    given: dict[str, Any] = {"messages": messages, "add_generation_prompt": chance.random() < 0.7}
    if chance.random() < 0.5:
        given["tools"] = chance.choice([TOOLS, [_TOOL], [*TOOLS[:1], _TOOL], []])
    if chance.random() < 0.3:
        given["enable_thinking"] = chance.random() < 0.5
    if chance.random() < 0.15:
        given["reasoning_effort"] = chance.choice(["low", "high"])
    if chance.random() < 0.1:
        given["documents"] = [{"title": "t", "text": text()}]
    return given


def vocabulary(source: str) -> Tokenizer:
    """Tokenizer with all that looks like a special token in a template."""
    special = sorted({*_SPECIAL.findall(source)})[:250]
    kinds = dict.fromkeys(["<s>", "</s>", *special], CONTROL)
    return tokenizer_from_metadata(byte_level([], kinds, bos_token_id=256, eos_token_id=257))


def theirs(source: str, tokenizer: Tokenizer, case: dict[str, Any]) -> str:
    """Rendering by transformers."""
    template = chat_template_utils._compile_jinja_template(source)
    template.globals["strftime_now"] = lambda kind: NOW.strftime(kind)
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    given = {name: tokenizer.token_text(token) for name, token in ids.items() if token is not None}
    given |= {"tools": None, "documents": None, "add_generation_prompt": False, **case}
    given["messages"] = chat_template_utils._alias_reasoning_fields(json.loads(json.dumps(case["messages"])))
    return str(template.render(**given))


def differences(source: str, cases: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Kind of each difference, and both results."""
    tokenizer = vocabulary(source)
    template = ChatTemplate(source, tokenizer)
    for case in cases:
        own: str | None
        try:
            expected, reason = theirs(source, tokenizer, case), ""
        except Exception as error:  # whatever the template makes transformers raise
            expected, reason = None, f"{type(error).__name__}: {error}"
        try:
            own, refusal = template.render(**case).text, ""
        except ChatTemplateError as error:
            own, refusal = None, str(error)
        if own == expected:
            continue
        has_null = any(message.get("content") is None for message in case["messages"])
        has_system = case["messages"][0]["role"] == "system"
        if own is None:
            kind = "tools refused" if "does not support tools" in refusal else "raises here only"
        elif expected is None:
            kind = "null content" if has_null else "system message" if has_system else "raises there only"
        else:
            kind = "text"
        at = next((i for i, (a, b) in enumerate(zip(own or "", expected or "", strict=False)) if a != b), 0)
        shown = slice(max(0, at - 60), at + 80)
        yield kind, f"{(own or refusal)[shown]!r}\n  transformers {(expected or reason)[shown]!r}\n  {case}"


def main() -> None:
    """Compare all templates of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of *.jinja files")
    parser.add_argument("-n", type=int, default=222, help="random conversations (default: 222)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    cases = [*CASES.values(), *(conversation(chance) for _ in range(given.n))]
    environment.datetime = types.SimpleNamespace(now=lambda: NOW)
    counts, n = collections.Counter[str](), 0
    for path in sorted(given.folder.glob("*.jinja")):
        shown = set[str]()
        n += len(cases)
        for kind, details in differences(path.read_text(encoding="utf-8"), cases):
            counts[kind] += 1
            if kind not in shown:
                shown.add(kind)
                print(f"{path.name}: {kind}\n  here         {details}", flush=True)
    print(f"{n} renders, {n - counts.total()} equal, {dict(counts)}")


if __name__ == "__main__":
    main()
