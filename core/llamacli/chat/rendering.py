"""Rendering of chat templates as jobs, JSON data in and out."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2

from llamacli.chat.environment import Budget, Environment, limited
from llamacli.chat.taint import CharacterMask

MAX_TEXT = 1 << 22
"""Characters of text that a rendering may have beyond those of the conversation."""

_FILE_NAME = "<template>"
"""File name of a template in Jinja's tracebacks."""


def execute(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a template, and render it if the job has messages.

    A job has the `source`; `seconds` of CPU time and `characters`, its limits; and to render `messages` (their roles
    are trusted, all other text is not), trusted variables `special`, other ones `given`, the `alphabet` of special
    tokens, and the time `now` in ISO's format. The answer has the masked `text` and the characters `original` by
    placeholder, or the reason of an `error`, its `line` or None, and the stage that `failed`.
    """
    failed = "compiled"
    try:
        with limited(Budget(job["seconds"], job["characters"])):
            template = _compiled(job["source"])
        if "messages" not in job:
            return {}
        failed = "rendered"
        with limited(Budget(job["seconds"], job["characters"], datetime.fromisoformat(job["now"]))):
            return _rendered(template, job)
    except MemoryError:
        raise
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == _FILE_NAME]
        line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else lines[-1] if lines else None
        with contextlib.suppress(Exception):
            reason = error.message if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            return {"error": str(reason)[:_MAX_REASON], "line": line, "failed": failed}
        return {"error": type(error).__name__, "line": line, "failed": failed}


_MAX_REASON = 2000
"""Characters of an error's reason that are kept."""


def _rendered(template: jinja2.Template, job: Mapping[str, Any]) -> dict[str, Any]:
    used = characters_of([job["messages"], job["given"]])
    mask = CharacterMask(job["alphabet"], used | set(job["source"]))
    messages = [{**mask.taint(message), "role": message["role"]} for message in job["messages"]]
    with mask.active():
        text = template.render({**job["special"], **mask.taint(job["given"]), "messages": messages})
    n_given = sum(map(_n_characters, (job["messages"], job["given"])))
    if len(text) > MAX_TEXT + n_given:
        raise jinja2.TemplateRuntimeError(f"it makes more than {MAX_TEXT >> 20} MiB of text")
    return {"text": str.__str__(text), "original": mask.original}


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return Environment().from_string(source)


def characters_of(value: Any) -> set[str]:
    """Set of all characters in the strings of a JSON value."""
    if isinstance(value, str):
        return set(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return set().union(*map(characters_of, value))
    return set()


def _n_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    return sum(map(_n_characters, value)) if isinstance(value, list | tuple) else 0
