"""Chat templates that llama.cpp has under a name, as tables of turns."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class Turns:
    """Texts around the messages of a chat, by role.

    %c is the content, %t the content without spaces around it, %r the role, %R the role in capitals.

    - `system`, `user`, `assistant`, `tool`: messages; None is refused. `other`: messages of roles without a text.
    - `start`: before all messages; `unless_system`: then, if the first message is not the system's.
    - `opens`: before the first message, and `reopens` before those that follow one of the assistant. `between`: before
      all but the first.
    - `generation`: beginning of a reply.
    """

    system: str | None = None
    user: str | None = None
    assistant: str | None = None
    tool: str | None = None
    other: str | None = None
    start: str = ""
    unless_system: str = ""
    opens: str = ""
    reopens: str | None = None
    between: str = ""
    generation: str = ""

    def template(self) -> str:
        """Jinja source."""
        again = self.opens if self.reopens is None else self.reopens
        parts = [_text(self.start)]
        if self.unless_system:
            parts.append(f"{{%- if messages[0].role != 'system' -%}}{_text(self.unless_system)}{{%- endif -%}}")
        parts.append("{%- for message in messages -%}")
        if self.opens:
            parts.append(f"{{%- if loop.first -%}}{_text(self.opens)}")
            parts.append(f"{{%- elif loop.previtem.role == 'assistant' -%}}{_text(again)}{{%- endif -%}}")
        if self.between:
            parts.append(f"{{%- if not loop.first -%}}{_text(self.between)}{{%- endif -%}}")
        word = "if"
        for role in ("system", "user", "assistant", "tool"):
            if (text := getattr(self, role)) is not None:
                parts.append(f"{{%- {word} message.role == '{role}' -%}}{_text(text)}")
                word = "elif"
        if self.other is None:
            refusal = "{{- raise_exception('this template has no messages of the role ' + message.role) -}}"
            parts.append(f"{{%- else -%}}{refusal}{{%- endif -%}}")
        else:
            parts.append(_text(self.other) if word == "if" else f"{{%- else -%}}{_text(self.other)}{{%- endif -%}}")
        parts.append("{%- endfor -%}")
        parts.append(f"{{%- if add_generation_prompt -%}}{_text(self.generation)}{{%- endif -%}}")
        return "".join(parts)


_PLACES = {"%c": "message.content", "%t": "message.content.strip()", "%r": "message.role", "%R": "message.role.upper()"}


def _text(text: str) -> str:
    parts, at = [], 0
    while (found := text.find("%", at)) >= 0:
        parts += [json.dumps(text[at:found], ensure_ascii=False), _PLACES[text[found : found + 2]]]
        at = found + 2
    parts.append(json.dumps(text[at:], ensure_ascii=False))
    shown = " + ".join(part for part in parts if part != '""')
    return f"{{{{- {shown} -}}}}" if shown else ""


@functools.cache
def named_templates() -> Mapping[str, Turns]:
    """Templates by llama.cpp's names, but for those of chat formats."""
    text = importlib.resources.files("llamacli").joinpath("data/chat_templates.json").read_text("utf-8")
    return {name: Turns(**fields) for name, fields in json.loads(text).items()}
