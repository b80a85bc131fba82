"""Scripts for the fake engine: events of replies."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from llamacli.chat.messages import ToolCall
from llamacli.serve.requests import (
    Admitted,
    Done,
    Event,
    Finished,
    FinishReason,
    PromptProgress,
    Request,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)


def reply(
    text: str,
    *,
    reasoning: str = "",
    calls: Sequence[tuple[str, dict[str, Any]]] = (),
    tokens: Sequence[TokenLogprob] = (),
    progress: Sequence[int] = (),
    reason: FinishReason = "stop",
) -> Callable[[Request], list[Event]]:
    """Script of a reply word by word."""

    def script(request: Request) -> list[Event]:
        words = re.findall(r"\s*\S+|\s+$", text)
        deltas: list[Event] = [PromptProgress(4000, 1000, n, 0.1) for n in progress]
        deltas += [TextDelta(0, word, True) for word in re.findall(r"\s*\S+", reasoning)]
        if tokens:
            deltas += [TextDelta(0, token.piece.decode(), tokens=(token,)) for token in tokens]
        else:
            deltas += [TextDelta(0, word) for word in words]
        deltas += [ToolCallDelta(0, i, ToolCall(name, arguments)) for i, (name, arguments) in enumerate(calls)]
        usage = Usage(sum(map(len, request.prompts)), 3, len(words))
        return [Admitted(0.0), *deltas, Finished(0, reason), Done(usage, Timings(0.0, 0.1, 0.5))]

    return script
