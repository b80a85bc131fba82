"""Output of `--logprobs`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from llamacli.cli.output import note

if TYPE_CHECKING:
    from llamacli import Model
    from llamacli.cli.generate import Completion


def logprobs_as_json(model: Model, completion: Completion) -> list[dict[str, Any]]:
    """Entries as in OpenAI's `logprobs.content`, and the id of each token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = model.tokenizer.piece_bytes(token, unparse_special=True)
        return {"id": token, "token": piece.decode(errors="replace"), "bytes": list(piece), "logprob": logprob}

    return [
        entry(token, logprobs.chosen) | {"top_logprobs": [entry(*pair) for pair in logprobs.top]}
        for token, logprobs in zip(completion.tokens, completion.logprobs, strict=True)
    ]


def print_logprobs(model: Model, completion: Completion) -> None:
    """Print the log-probabilities to stderr, a line per token."""

    def text(token: int) -> str:
        return repr(model.tokenizer.piece(token, unparse_special=True))

    note("  logprob  token           likeliest")
    for token, logprobs in zip(completion.tokens, completion.logprobs, strict=True):
        likeliest = "  ".join(f"{text(other)} {math.exp(value):.1%}" for other, value in logprobs.top)
        note(f"{logprobs.chosen:9.4f}  {text(token):15} {likeliest}")
