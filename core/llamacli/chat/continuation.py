"""Prompts that end within the text or the reasoning of a reply."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat.codec import ChatCodec
from llamacli.chat.template import Rendering
from llamacli.errors import ChatTemplateError

_CUT = "\ue000"
"""Mark of the place where a rendering is cut: a character for private use."""


def continued(
    codec: ChatCodec, messages: Sequence[Mapping[str, Any]], what: str | None = None, **options: Any
) -> Rendering:
    """Render messages whose last one is the beginning of the reply.

    `options` are those of `ChatCodec.render`. `what` is continued, "content" or "reasoning_content"; by default its
    content, or its reasoning if it has no content. The template writes the message, with what it puts before the text;
    where it leaves the text out, that follows the generation prompt. Raises ChatTemplateError for reasoning that the
    template's replies do not have.
    """
    *before, final = messages
    key = what or ("content" if final.get("content") or not final.get("reasoning_content") else "reasoning_content")
    text = final.get(key) or ""
    if text or (key == "content" and final.get("reasoning_content")):
        marked, cut = {**final, key: text + _CUT}, None
        with contextlib.suppress(ChatTemplateError) if key == "reasoning_content" else contextlib.nullcontext():
            cut = _cut(codec.render([*before, marked], add_generation_prompt=False, **options), text)
        if cut is not None and (key == "content" or codec.opens_reasoning(cut.prompt)):
            return attrs.evolve(cut, begun="") if key == "content" else cut
    rendering = codec.render(before, **options)
    if key == "content":
        return _extended(codec, rendering, text)
    if not codec.opens_reasoning(rendering.text):
        markers = codec.thought_markers(rendering)
        if not markers:
            raise ChatTemplateError("the chat template's replies have no reasoning to continue")
        rendering = _extended(codec, rendering, markers[0], special=True)
    return attrs.evolve(_extended(codec, rendering, text), begun=text)


def _cut(rendering: Rendering, text: str) -> Rendering | None:
    """Rendering up to the mark, None if the mark is not there."""
    for i in reversed(range(len(rendering.parts))):
        part = rendering.parts[i]
        if isinstance(part, str) and _CUT in part:
            head = part.rpartition(_CUT)[0]
            return Rendering(rendering.text.rpartition(_CUT)[0], [*rendering.parts[:i], head], text)
    return None


def _extended(codec: ChatCodec, rendering: Rendering, text: str, *, special: bool = False) -> Rendering:
    """Rendering with a text behind it, its markers tokens if `special`."""
    parts = list(rendering.parts)
    for part in codec.tokenizer.split(text, codec.template.structure if special else ()):
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return Rendering(rendering.text + text, parts)
