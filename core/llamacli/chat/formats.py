"""How to talk to a model: its chat template, its plugin's where the file has none, and how its replies are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from llamacli.chat.syntax import HARMONY, HERMES, PLAIN, THINKING, Syntax
from llamacli.errors import ChatTemplateError, plugin_errors
from llamacli.gguf import Metadata
from llamacli.tokenizer import Tokenizer

_TEMPLATE = "tokenizer.chat_template"


@attrs.frozen
class Clues:
    """What a file gives away: its `metadata`, its own `template` or None, its `tokenizer`."""

    metadata: Metadata
    template: str | None
    tokenizer: Tokenizer

    def has_tokens(self, *texts: str) -> bool:
        """Whether all these are tokens of the vocabulary."""
        return all(self.tokenizer.token_id(text) is not None for text in texts)

    def mentions(self, *texts: str) -> bool:
        """Whether all these stand in the template or, of a file without one, in the vocabulary."""
        return all(text in self.template for text in texts) if self.template else self.has_tokens(*texts)


@attrs.frozen(kw_only=True)
class ChatFormat:
    """A way to talk to models, which a plugin registers.

    - `name`: under which it can be asked for.
    - `matches`: whether a file is of this format. Formats are asked in the order of their registration, the core's
      last, and the first that matches is taken.
    - `template`: a Jinja template for files that have none of their own. A format without one is not asked for those.
    - `tokens`: the special tokens that `template` cannot do without.
    - `syntax`: how replies are written.
    """

    name: str
    matches: Callable[[Clues], bool]
    template: str | None = None
    tokens: tuple[str, ...] = ()
    syntax: Syntax = PLAIN


CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

CORE_FORMATS = (
    ChatFormat(
        name="harmony",
        matches=lambda clues: clues.mentions(HARMONY.starts, HARMONY.channel, HARMONY.begins),
        syntax=HARMONY,
    ),
    ChatFormat(name="hermes", matches=lambda clues: clues.mentions("<tool_call>"), syntax=HERMES),
    ChatFormat(name="thinking", matches=lambda clues: clues.mentions("</think>"), syntax=THINKING),
    ChatFormat(
        name="chatml",
        matches=lambda clues: clues.mentions("<|im_start|>", "<|im_end|>"),
        template=CHATML,
        tokens=("<|im_start|>", "<|im_end|>"),
        syntax=HERMES,
    ),
    ChatFormat(name="plain", matches=lambda clues: True),
)


def own_templates(metadata: Metadata) -> dict[str, str]:
    """The templates that a file brings, by name; the nameless one is "default"."""
    prefix = f"{_TEMPLATE}."
    named = {key.removeprefix(prefix): metadata.get_str(key) for key in metadata if key.startswith(prefix)}
    default = metadata.get_str(_TEMPLATE, None)
    return named if default is None else {**named, "default": default}


def choose(
    metadata: Metadata, tokenizer: Tokenizer, formats: Iterable[ChatFormat], wanted: str | None = None
) -> ChatFormat:
    """The format of a file, its `template` filled in with the file's own if it has one.

    `wanted` asks for another template: the name of one that the file brings or of a format that has one, or Jinja.

    Raises ChatTemplateError if there is none, or if the vocabulary lacks a token that its template needs.
    """
    known = [*formats, *CORE_FORMATS]
    own = own_templates(metadata)
    template = own.get(wanted or "default")
    if wanted and template is None and "{" in wanted:
        template = wanted
    clues = Clues(metadata, template or None, tokenizer)
    if wanted and not template:
        named = next((fmt for fmt in known if fmt.name == wanted and fmt.template), None)
        if named is None:
            names = ", ".join(sorted({*own, *(fmt.name for fmt in known if fmt.template)}))
            raise ChatTemplateError(f"chat template {wanted!r} is not one of {names}")
        return _checked(named, clues)
    fitting = next((fmt for fmt in known if (template or fmt.template) and _matches(fmt, clues)), None)
    if fitting is None:
        raise ChatTemplateError(f"{metadata.source}: it has no chat template, and no plugin has one that fits")
    return attrs.evolve(fitting, template=template, tokens=()) if template else _checked(fitting, clues)


def _checked(fmt: ChatFormat, clues: Clues) -> ChatFormat:
    lacking = [text for text in fmt.tokens if not clues.has_tokens(text)]
    if lacking:
        raise ChatTemplateError(
            f"{clues.metadata.source}: the vocabulary lacks {', '.join(lacking)}, which chat format {fmt.name!r} needs"
        )
    return fmt


def _matches(fmt: ChatFormat, clues: Clues) -> bool:
    with plugin_errors(f"chat format {fmt.name!r}"):
        return fmt.matches(clues)
