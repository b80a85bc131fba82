"""Errors of clusters and replicas."""

from __future__ import annotations

import re

from llamacli.errors import LlamaCliError

_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w]*\.)*([A-Za-z_]\w*): (.+)$")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class ClusterError(LlamaCliError):
    """The cluster cannot be reached, or cannot run the replicas."""


class MismatchError(ClusterError):
    """A node has another version of this package, or another model."""


def reason_of(message: str) -> str:
    """Last exception in a message of Ray's, or the message's first line."""
    lines = _ESCAPES.sub("", message.replace("\\x1b", "\x1b").replace("\\n", "\n")).strip().splitlines()
    found = [match for line in lines if (match := _EXCEPTION.match(line.strip()))]
    if not found:
        return lines[0] if lines else ""
    name, text = found[-1].groups()
    return f"{text} ({name})"
