"""Compare parsed replies with llama.cpp's: `python -m oracle.chat_replies LLAMA_CPP`.

The argument is the folder of llama.cpp's sources: the cases are those of `tests/test-chat.cpp`, with the templates that
they name. Nothing of them is kept here. Each reply is read whole and by character, after the prompt of the template and
with the tools of the case. Prints counts by template; with `-v` also the replies that are read differently.
"""

import argparse
import collections
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llamacli.chat.codec import ChatCodec
from llamacli.chat.continuation import continued
from llamacli.chat.messages import Piece, ToolCall
from llamacli.chat.template import Rendering
from llamacli.errors import ChatTemplateError
from llamacli.gguf import Metadata
from llamacli.plugins import Plugins
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata

ARCHITECTURES = {
    "Qwen3.5": "qwen35", "Qwen3-Coder": "qwen3moe", "Qwen-Qwen3": "qwen3", "gpt-oss": "gpt-oss", "gemma-4": "gemma4",
    "gemma-2": "gemma2", "Ministral-3": "mistral3", "Qwen2.5": "qwen2", "QwQ": "qwen2", "Distill-Qwen": "qwen2",
    "Distill-Llama": "llama", "DeepSeek-V": "deepseek2", "deepseek-r1": "deepseek2", "GLM-4.6": "glm4moe",
    "GLM-4.7": "deepseek2", "Kimi": "deepseek2", "MiniMax": "minimax-m2", "Nemotron-3": "nemotron_h_moe",
    "Nemotron-Nano": "nemotron_h", "granite-4.0": "granitehybrid", "granite": "granite", "Phi": "phi3",
    "LFM2-8B": "lfm2moe", "LFM2.5-8B": "lfm2moe", "LFM2": "lfm2", "SmolLM3": "smollm3", "Seed-OSS": "seed_oss",
    "r7b": "cohere2", "r-plus": "command-r", "Cohere2MoE": "cohere2", "Apertus": "apertus", "MiMo": "qwen2vl",
    "Solar": "glm4moe", "GigaChat": "deepseek2", "rwkv": "rwkv7",
}  # fmt: skip
"""Architectures by part of a template's name; `llama` for others."""

_SPECIAL = re.compile(r"\]<\]\w+\[>\[|(?!</?item>)<\|?[｜|]?[^<>\s'\"{}%]{1,40}[｜|]?>|\[/?[A-Z_]+\]")
_ALWAYS = ("<s>", "</s>", "<|tool_call_start|>", "<|tool_call_end|>")
"""Tokens that vocabularies have whose templates do not spell them."""
_TOKENS = re.compile(r'R"([^()\s]*)\((.*?)\)\1"|"((?:[^"\\]|\\.)*)"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def as_python(code: str) -> str:
    """C++ expressions as Python's: literals, lists in braces, names."""
    parts, at = [], 0
    for found in _TOKENS.finditer(code):
        parts.append(_names(code[at : found.start()]))
        if found[2] is not None:
            parts.append(f" {found[2]!r} ")
        elif found[3] is not None:
            parts.append(f' "{found[3]}" '.replace("\n", "\\n"))
        at = found.end()
    return "".join([*parts, _names(code[at:])])


def _names(code: str) -> str:
    code = re.sub(r"std::(string|vector<[^;{]*>)\s*(?=[({])", "list_of" if "vector" in code else "str", code)
    code = code.replace("{", "[").replace("}", "]").replace("::", ".")
    return re.sub(r"\btrue\b", "True", re.sub(r"\bfalse\b", "False", code))


class Case:
    """Case of the peer: request, reply, and expected message."""

    def __init__(self, template: str, text: str):
        self.template, self.text, self.options = template, text, dict[str, Any]()
        self.content = self.reasoning = ""
        self.calls: list[Any] = []

    def expect(self, message: Any) -> "Case":
        """Set the whole message."""
        self.content, self.reasoning, self.calls = message.content, message.reasoning, message.calls
        return self

    def of(self, template: str) -> "Case":
        """Case for another template."""
        copy = Case(template, self.text)
        vars(copy).update({**vars(self), "template": template})
        return copy

    def __getattr__(self, name: str) -> Any:
        def setter(*values: Any) -> Case:
            value = values[0] if values else True
            if name.startswith("expect_"):
                kind = {"expect_tool_calls": "calls"}.get(name, name.removeprefix("expect_"))
                setattr(self, kind, value)
            else:
                self.options[name] = value
            return self

        return setter

    @property
    def kind(self) -> str:
        """Kind of the case: whole, partial, continued or with a schema."""
        named = {"is_partial": "partial", "continue_final_message": "continued", "json_schema": "schema"}
        return next((kind for name, kind in named.items() if self.options.get(name)), "whole")


def message(content: str, reasoning: str = "", name: str = "", arguments: str = "", number: str = "") -> Any:
    """Expected message."""
    return SimpleNamespace(content=content, reasoning=reasoning, calls=[[name, arguments]] if name else [])


def cases(source: str) -> Iterator[Case]:
    """Cases in the source of the tests, in order.

    Cases that cannot be evaluated are printed.
    """
    known: dict[str, Any] = {
        "simple_assist_msg": message,
        "message_with_tool_calls": lambda name, text: message("", "", name, text),
        "message_with_tool_calls_and_reasoning": lambda name, text, why: message("", why, name, text),
        "message_with_reasoning_and_tool_call": lambda why, name, text: message("", why, name, text),
        "message_with_content_and_tool_call": lambda text, name, given: message(text, "", name, given),
        "message_with_reasoning_content_and_multiple_tool_calls": lambda why, text, calls: SimpleNamespace(
            content=text, reasoning=why, calls=calls
        ),
    }
    begins = re.compile(
        r"common_chat_tool\s+(?P<tool>\w+)\s*\{|(?:auto|common_chat_msg)\s+(?P<name>\w+)\s*=\s*|"
        r"const\s+(?:auto|std::string|char\s*\*)\s*&?\s*(?P<text>\w+)\s*=\s*|std::string\s+(?P<local>\w+)\s*=\s*|"
        r"vector<common_chat_tool>\s+(?P<tools>\w+)\s*\{|common_chat_msg\s+(?P<made>\w+)\s*\{|"
        r"peg_tester\((?P<template>\"[^\"]*\"|template_path|path\b)|(?P<case>tst\s*\.\s*test)\(|"
        r"for \(const auto & path :\s*\{(?P<paths>[^}]*)\}|"
        r"(?P<called>\"models/templates/LFM2[^\"]*\"),\s|(?P<comment>//[^\n]*)"
    )
    template, shared, called = "", list[Case](), list[str]()
    paths: list[str] = []
    at = 0
    while found := begins.search(source, at):
        at = found.end()
        if found["comment"]:
            continue
        if found["called"]:
            called.append(json.loads(found["called"]))
            continue
        if found["paths"]:
            paths = re.findall(r'"([^"]*)"', found["paths"])
            continue
        if found["template"]:
            template = found["template"].strip('"')
            continue
        end = _end(source, found.start())
        code = source[at:end]
        if found["tool"] or found["tools"] or found["made"]:
            name, code = found["tool"] or found["tools"] or found["made"], "{" + code
        else:
            name = found["name"] or found["text"] or found["local"] or ""
        try:
            if found["case"]:
                make = functools.partial(Case, template)
                case = eval("tst(" + as_python(code).replace("\n", " "), _Names({**known, "tst": make}))
                if template == "template_path":
                    shared.append(case)
                else:
                    yield from [case.of(path) for path in paths] if template == "path" else [case]
            else:
                known[name] = eval("(" + as_python(code).replace("\n", " ") + ")", _Names(known))
        except Exception as error:
            if found["case"]:
                print(f"line {source[:at].count(chr(10)) + 1}: {type(error).__name__}: {error}")
        if found["case"]:
            at = end
    for path in dict.fromkeys(called):
        yield from [case.of(path) for case in shared]


class _Names(dict[str, Any]):
    """Names of C++ that are not known stand for themselves."""

    def __missing__(self, name: str) -> Any:
        if name in ("str", "list", "len"):
            return {"str": str, "list": list, "len": len}[name]
        return name


def _end(source: str, at: int) -> int:
    """Place of the semicolon that ends a statement."""
    for found in re.compile(_TOKENS.pattern + "|;", re.DOTALL).finditer(source, at):
        if found[0] == ";":
            return found.start()
    return len(source)


def codec_of(path: Path, plugins: Plugins | None = None, architecture: str | None = None) -> ChatCodec:
    """Codec of a template file.

    Its vocabulary has the special tokens that the template spells.
    """
    source = path.read_text()
    name = architecture or next((found for part, found in ARCHITECTURES.items() if part in path.stem), "llama")
    values = byte_level([], dict.fromkeys(dict.fromkeys([*_SPECIAL.findall(source), *_ALWAYS]), CONTROL))
    values |= {"general.architecture": name, "tokenizer.chat_template": source}
    tokens = values["tokenizer.ggml.tokens"]
    values |= {
        f"tokenizer.ggml.{kind}_token_id": tokens.index(text) for kind, text in (("bos", "<s>"), ("eos", "</s>"))
    }
    metadata = Metadata(values, path.name)
    plugins = plugins or Plugins()
    plugins.architecture(name)
    return ChatCodec(tokenizer_from_metadata(metadata), metadata, plugins.chat_formats())


def syntax_of(codec: ChatCodec) -> Any:
    return getattr(codec, "syntax", codec.format.syntax)


def parsed(
    codec: ChatCodec, rendering: Rendering, text: str, tools: list[Any], size: int
) -> tuple[str, str, list[ToolCall]]:
    """Content, reasoning and calls of a reply in pieces."""
    ends = [codec.tokenizer.token_text(token) for token in codec.ends().tokens]
    text = text[: min((at for at in map(text.find, ends) if at >= 0), default=None)]
    reader = syntax_of(codec).reader(rendering.prompt, tools=tools)
    reader.begin(rendering.begun)
    events = [event for at in range(0, len(text), size) for event in reader.feed(text[at : at + size])]
    events += reader.flush()
    pieces = [event for event in events if isinstance(event, Piece)]
    return (
        "".join(piece.text for piece in pieces if not piece.reasoning),
        "".join(piece.text for piece in pieces if piece.reasoning),
        [event for event in events if isinstance(event, ToolCall)],
    )


def arguments(text: str) -> Any:
    """Arguments of an expected call, text if they are cut."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text.strip()


def check(case: Case, codec: ChatCodec) -> str:
    """Difference between a reply and the expected one, "" for none."""
    tools = [
        {"type": "function", "function": {"name": name, "description": about, "parameters": json.loads(schema)}}
        for name, about, schema in case.options.get("tools", [])
    ]
    given: dict[str, Any] = {"enable_thinking": case.options.get("enable_thinking", True)}
    asked = [{"role": "user", "content": "Hey there!"}]
    begun = SimpleNamespace(content="", reasoning="")
    try:
        if case.kind == "continued":
            begun = case.options["messages"][-1]
            asked.append({"role": "assistant", "content": begun.content, "reasoning_content": begun.reasoning})
            what = "content" if "CONTENT" in str(case.options["continue_final_message"]) else "reasoning_content"
            rendering = continued(codec, asked, what, tools=tools or None, variables=given)
        else:
            rendering = codec.render(asked, tools=tools or None, variables=given)
    except ChatTemplateError as error:
        return f"{type(error).__name__}: {error}"
    results = [parsed(codec, rendering, case.text, tools, size) for size in (1, len(case.text) or 1)]
    if results[0] != results[1]:
        return f"read by character {results[0]}, whole {results[1]}"
    content, reasoning, calls = results[0]
    content, reasoning = begun.content + content, (begun.reasoning if case.reasoning else "") + reasoning
    made = [(call.name, call.arguments if call.partial is None else call.partial.strip() or {}) for call in calls]
    wanted = [(call[0], arguments(call[1])) for call in case.calls]
    if "NONE" in str(case.options.get("reasoning_format", "NONE")) and not case.reasoning:
        # the peer leaves reasoning in the content, with its markers
        markers = ["".join(codec.thought_markers(rendering)[:1]), *syntax_of(codec).markers]
        markers = [text for text in markers if text]
        texts = [reasoning + content, case.content]
        texts = ["".join(re.sub("|".join(map(re.escape, markers)) or "(?!)", "", text).split()) for text in texts]
        same = texts[0] == texts[1]
    else:
        # the peer counts what the prompt has of the reasoning as the reply's
        opens = (
            rendering.prompt.rpartition("\n\n")[2].rpartition(">\n")[2]
            if codec.opens_reasoning(rendering.prompt)
            else ""
        )
        wanted_reasoning = case.reasoning.removeprefix(opens).strip()
        same = (content.strip(), reasoning.strip()) == (case.content.strip(), wanted_reasoning)
    return (
        "" if same and made == wanted else f"{(content, reasoning, made)}\n  not {case.content, case.reasoning, wanted}"
    )


def main() -> None:
    """Check all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="sources of llama.cpp")
    parser.add_argument("-v", action="store_true", help="print the replies that are read differently")
    parser.add_argument("--kind", default="whole", help="kind of cases: whole, partial, continued or schema")
    parser.add_argument("-k", default="", help="only templates with this in their names")
    options = parser.parse_args()
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    codecs: dict[str, ChatCodec] = {}
    for case in cases((options.folder / "tests/test-chat.cpp").read_text()):
        if options.k not in case.template or case.kind != options.kind:
            continue
        codec = codecs.get(case.template) or codec_of(options.folder / case.template)
        codecs[case.template] = codec
        problem = check(case, codec)
        counts[case.template][1] += 1
        counts[case.template][0] += not problem
        if problem and options.v:
            print(f"{Path(case.template).stem}: {case.text!r}\n  {problem}")
    for template, (n_equal, n) in sorted(counts.items()):
        print(f"{n_equal:4}/{n:<4}{Path(template).stem}")
    print(f"{sum(n for n, _ in counts.values()):4}/{sum(n for _, n in counts.values()):<4}all")


if __name__ == "__main__":
    main()
