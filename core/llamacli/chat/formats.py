"""Chat formats: a template and the syntax of replies, detected by file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import NoneType
from typing import TYPE_CHECKING

import attrs

from llamacli.chat.channels import HARMONY
from llamacli.chat.named import named_templates
from llamacli.chat.syntax import HERMES, Syntax
from llamacli.errors import ChatTemplateError, expect_type, plugin_errors
from llamacli.gguf import Metadata

if TYPE_CHECKING:
    from llamacli.tokenizer import Tokenizer

_TEMPLATE = "tokenizer.chat_template"


@attrs.frozen
class TemplateInfo:
    """File properties from which a chat format is detected.

    These are its `metadata`, `template` and `tokenizer`. `template` is the file's own chat template, or None.
    """

    metadata: Metadata
    template: str | None
    tokenizer: Tokenizer

    def has_tokens(self, *texts: str) -> bool:
        """True if all these texts are tokens of the vocabulary."""
        return all(self.tokenizer.token_id(text) is not None for text in texts)

    def mentions(self, *texts: str) -> bool:
        """True if the template has all these texts; without one, the vocabulary."""
        return all(text in self.template for text in texts) if self.template else self.has_tokens(*texts)


@attrs.frozen(kw_only=True)
class ChatFormat:
    """Chat format: files it fits, template, and syntax of replies.

    - `name`: for `--template` and `create_chat(template=...)`.
    - `matches`: whether a file is of this format. Formats are tried in the order of their registration, the core's
      last, and the first that matches is taken.
    - `template`: a Jinja template for files that have none of their own. A format without one is not tried for those.
    - `tokens`: the special tokens that `template` needs.
    - `syntax`: how reasoning and tool calls are written in replies; None derives it from the template.
    """

    name: str
    matches: Callable[[TemplateInfo], bool]
    template: str | None = None
    tokens: tuple[str, ...] = ()
    syntax: Syntax | None = None


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
        matches=lambda info: info.mentions(HARMONY.starts, HARMONY.channel, HARMONY.begins),
        syntax=HARMONY,
    ),
    ChatFormat(
        name="chatml",
        matches=lambda info: info.template is None and info.has_tokens("<|im_start|>", "<|im_end|>"),
        template=CHATML,
        tokens=("<|im_start|>", "<|im_end|>"),
        syntax=HERMES,
    ),
    ChatFormat(name="derived", matches=lambda info: True),
)


def own_templates(metadata: Metadata) -> dict[str, str]:
    """Chat templates of a file, by name; the nameless one is "default"."""
    prefix = f"{_TEMPLATE}."
    named = {key.removeprefix(prefix): metadata.get_str(key) for key in metadata if key.startswith(prefix)}
    default = metadata.get_str(_TEMPLATE, None)
    return named if default is None else {**named, "default": default}


def choose(
    metadata: Metadata, tokenizer: Tokenizer, formats: Iterable[ChatFormat], wanted: str | None = None
) -> ChatFormat:
    """Choose the chat format of a file.

    Its `template` becomes the file's own if it has one; a file may have the name of a format there. `formats` are tried
    in order, and then `CORE_FORMATS`. `wanted` selects another template: the name of one in the file, of a format that
    has one, or of llama.cpp, or Jinja source, which has a brace or a space.

    Raises ChatTemplateError if there is none, or if the vocabulary lacks a token that its template needs.
    """
    expect_type(wanted, (str, NoneType), "template", "a str")
    known = [*formats, *CORE_FORMATS]
    own = own_templates(metadata)
    template = own.get(wanted or "default")
    name = template or wanted or ""
    is_short = name and not {*name} & {"{", " ", "\n"}  # most templates are source, for which no table is read
    if is_short and name in named_templates() and not any(fmt.name == name and fmt.template for fmt in known):
        template = named_templates()[name].template()
    elif wanted and template is None and ("{" in wanted or " " in wanted):
        template = wanted
    elif any(fmt.name == template and fmt.template for fmt in known):  # files may name one of llama.cpp's formats
        wanted, template = template, None
    info = TemplateInfo(metadata, template or None, tokenizer)
    if wanted and not template:
        named = next((fmt for fmt in known if fmt.name == wanted and fmt.template), None)
        if named is None:
            names = ", ".join(sorted({*own, *named_templates(), *(fmt.name for fmt in known if fmt.template)}))
            raise ChatTemplateError(f"chat template {wanted!r} is not one of {names}")
        return _checked(named, info)
    fitting = next((fmt for fmt in known if (template or fmt.template) and _matches(fmt, info)), None)
    if fitting is None:
        raise ChatTemplateError(f"{metadata.source}: it has no chat template, and no plugin has one that fits")
    return attrs.evolve(fitting, template=template, tokens=()) if template else _checked(fitting, info)


def _checked(fmt: ChatFormat, info: TemplateInfo) -> ChatFormat:
    lacking = [text for text in fmt.tokens if not info.has_tokens(text)]
    if lacking:
        raise ChatTemplateError(
            f"{info.metadata.source}: the vocabulary lacks {', '.join(lacking)}, which chat format {fmt.name!r} needs"
        )
    return fmt


def _matches(fmt: ChatFormat, info: TemplateInfo) -> bool:
    with plugin_errors(f"chat format {fmt.name!r}"):
        return fmt.matches(info)
