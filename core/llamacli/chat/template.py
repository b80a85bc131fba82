"""Chat templates, compiled and rendered as Hugging Face's transformers does."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat import environment, isolation
from llamacli.errors import ChatTemplateError
from llamacli.tokenizer import Tokenizer, TokenKind

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Message keys for reasoning in templates, the standard one first."""

_PROBE = "Xyzzy"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "Nothing.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "Nothing."}},
            "required": ["x"],
        },
    },
}


_PROBE_CALLS = [
    {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": _PROBE, "arguments": arguments}},
        ],
    }
    for content in ("", None)
    for arguments in ({"x": "x"}, '{"x": "x"}')
]
"""Messages with a call: some templates expect a null content, some arguments as JSON text."""

_READS_TYPE = re.compile(r"""\[\s*['"]type['"]\s*\]|\.type\b""")
"""Access to the type of a part of a content, in a template."""

_MAX_KNOWN = 64
"""Number of sets of variables for which the results of probes are remembered."""


@attrs.frozen
class Rendering:
    """Rendered conversation.

    Its `text`, and its `parts`, runs of text and the ids of special tokens between them. The ids are of tokens in the
    template's `structure`, where the template itself spelled them. `begun` is reasoning at the end that the reply
    continues.
    """

    text: str
    parts: Sequence[int | str]
    begun: str = ""

    @property
    def prompt(self) -> str:
        """Text before the reply, without `begun`."""
        return self.text.removesuffix(self.begun)


class ChatTemplate:
    """Compiled Jinja chat template.

    - `source`: its text. `tokenizer`: the vocabulary.
    - `hit_limit`: true once a rendering took too much time or memory, as it may not on another day.
    - `structure`: the special tokens that no text of a message may become: all control tokens, and user-defined tokens
      that look like markup.
    Raises ChatTemplateError if the source is not a template; the message names the line. Time and memory of rendering
    are limited.
    """

    def __init__(self, source: str, tokenizer: Tokenizer):
        self.source, self.tokenizer, self.hit_limit = source, tokenizer, False
        self._run({})
        self.structure = frozenset(token for token in tokenizer.special_ids if self._is_structure(token))
        self._control_ids = frozenset(
            token for token in self.structure if tokenizer.kind(token) is not TokenKind.UNKNOWN
        )
        self._alphabet = "".join(sorted(set("".join(map(tokenizer.token_text, self.structure)))))
        self._special = _special_tokens(tokenizer)
        self._knows: dict[str, bool] = {}

    def takes_system(self, **given: Any) -> bool:
        """True if the template renders a system message.

        `given` are the tools, documents and variables that are passed to it.
        """
        return self._shows("system", [{"role": "system", "content": _PROBE}, {"role": "user", "content": "x"}], given)

    def end_texts(self) -> list[str]:
        """Texts of the tokens that end replies."""
        return [self.tokenizer.token_text(token) for token in sorted(self.tokenizer.eog_ids)]

    def takes_tools(self, **variables: Any) -> bool:
        """True if the template renders tools, or at least calls of tools.

        A template that renders calls only may be used with tools that the system message describes.
        """
        user = {"role": "user", "content": "x"}
        return self._shows("tools", [user], {**variables, "tools": [_PROBE_TOOL]}) or any(
            self._shows(f"calls {n}", [user, call, {"role": "tool", "content": "x"}, user], variables)
            for n, call in enumerate(_PROBE_CALLS)
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Rendering:
        """Render a conversation; with `add_generation_prompt` up to where the model replies.

        `messages` have a "role" (system, developer, user, assistant, tool) and the other keys that the template reads:
        "content", "tool_calls", "reasoning_content" and so on. `variables` are passed to the template, such as
        `enable_thinking=False`. A system message that the template does not render is put before the first user's text.

        Raises ChatTemplateError if the template fails or raises, naming its line, or if it does not render tools.
        """
        given = {**variables, "tools": tools, "documents": documents}
        if tools and not self.takes_tools(**{**given, "tools": None}):
            raise ChatTemplateError("the chat template does not support tools, and tools were given")
        if messages and messages[0].get("role") == "system" and not self.takes_system(**given):
            messages = _folded(messages)
        try:
            return self._render(messages, add_generation_prompt, given)
        except ChatTemplateError:
            # OpenAI's form of a message with calls only, and of no tools; many templates expect text and a list
            filled = [_filled(message) for message in messages]
            if filled == list(messages) and tools is not None:
                raise
            return self._render(filled, add_generation_prompt, {**given, "tools": tools or []})

    def encode(self, run: str, continues: bool = False) -> list[int]:
        """Encode a run of text without control tokens.

        User-defined tokens are found as usual, except those that look like markup, which may be part of the format.
        A run that `continues` text gets no space before it.
        """
        ids = self.tokenizer.encode_run(run, self.structure, continues)
        if self._control_ids.isdisjoint(ids):
            return ids
        # Merging pieces may make a control token too, of the text that spells it.
        return [part for token in ids for part in (self._spelled(token) if token in self._control_ids else [token])]

    def _spelled(self, token: int) -> list[int]:
        """Spell a control token's text in other tokens."""
        text = self.tokenizer.token_text(token)
        if len(text) < 2:
            return [token]  # no other token spells a single character
        return self.encode(text[0], True) + self.encode(text[1:], True)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, given: Mapping[str, Any]
    ) -> Rendering:
        if "+ functions" in self.source and "+ datetime" in self.source:  # FireFunction's names
            functions = [tool["function"] for tool in given["tools"] or ()] if "tools" in given else []
            made = {"functions": json.dumps(functions, indent=4), "datetime": environment.now().strftime("%c GMT")}
            given = {**made, **given}
        if self._takes_parts_only:
            messages = [_with_parts(message) for message in messages]
        answer = self._run(
            {
                "messages": [_prepared(message) for message in messages],
                "special": {**self._special, "add_generation_prompt": add_generation_prompt},
                "given": given,
                "alphabet": self._alphabet,
                "now": environment.now().isoformat(),
            }
        )
        masked, originals = answer["text"], str.maketrans(answer["original"])
        split = self.tokenizer.split(masked, self.structure)
        parts = [part if isinstance(part, int) else part.translate(originals) for part in split]
        return Rendering(masked.translate(originals), parts)

    @functools.cached_property
    def _takes_parts_only(self) -> bool:
        """True if the template renders contents as lists of parts only.

        Those of many models that see loop over the parts, and leave out the text of a string without a word.
        """
        if not _READS_TYPE.search(self.source):
            return False
        shown = []
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            job = {"messages": [{"role": "user", "content": content}], "special": self._special, "given": {}}
            answer = isolation.run(
                {
                    "source": self.source, "seconds": environment.MAX_SECONDS, "alphabet": "",
                    "characters": environment.MAX_CHARACTERS, "now": environment.now().isoformat(), **job,
                }
            )  # fmt: skip
            shown.append(_PROBE in answer.get("text", ""))
        return shown == [False, True]

    def _run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Compile and render; raises ChatTemplateError with the line."""
        limits = {"seconds": environment.MAX_SECONDS, "characters": environment.MAX_CHARACTERS}
        answer = isolation.run({"source": self.source, **limits, **job})
        if "error" in answer:
            self.hit_limit |= answer.get("limit", False)
            where = f", line {answer['line']}" if answer["line"] else ""
            raise ChatTemplateError(f"the chat template cannot be {answer['failed']}{where}: {answer['error']}")
        return answer

    def _shows(self, kind: str, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> bool:
        """True if the probe appears in the rendering, with these variables."""
        key = kind + json.dumps(given, sort_keys=True, default=repr)
        if key not in self._knows:
            try:
                shows = _PROBE in self._render(messages, True, given).text
            except ChatTemplateError:
                shows = False
            if len(self._knows) >= _MAX_KNOWN:
                self._knows.clear()
            if self.hit_limit:
                return shows
            self._knows[key] = shows
        return self._knows[key]

    def _is_structure(self, token: int) -> bool:
        """True if a special token may come from the template only."""
        text = self.tokenizer.token_text(token)
        if self.tokenizer.kind(token) is not TokenKind.USER_DEFINED:
            return True
        is_markup = len(text) > 2 and text[0] + text[-1] in ("<>", "[]")
        return is_markup and ("|" in text or text in self.source)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Check the role of a message; put its reasoning under every name."""
    role = message.get("role")
    if role not in _ROLES:
        raise ChatTemplateError(f"the role {role!r} of a message is not one of {', '.join(sorted(_ROLES))}")
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": _content_parts(content)} if isinstance(content, str) else message


def _filled(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace a null content beside tool calls by an empty text."""
    is_null = message.get("content") is None and message.get("tool_calls")
    return {**message, "content": ""} if is_null else message


def _folded(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Put the system message before the first user's text."""
    system, *rest = messages
    for i, message in enumerate(rest):
        if message.get("role") == "user":
            before, content = system.get("content"), message.get("content")
            if isinstance(before, str) and isinstance(content, str):
                both: Any = f"{before}\n\n{content}"
            else:
                both = [*_content_parts(before), {"type": "text", "text": "\n\n"}, *_content_parts(content)]
            rest[i] = {**message, "content": both}
            return rest
    return [{**system, "role": "user"}, *rest]


def _content_parts(content: Any) -> list[Any]:
    return list(content) if isinstance(content, list | tuple) else [{"type": "text", "text": content or ""}]


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {
        "bos_token": tokenizer.bos_id,
        "eos_token": tokenizer.eos_id,
        "unk_token": tokenizer.unk_id,
        "pad_token": tokenizer.pad_id,
    }
    return {name: tokenizer.token_text(token) for name, token in ids.items() if token is not None}
