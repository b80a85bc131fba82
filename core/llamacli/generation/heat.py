"""Tokens as HTML, coloured by probability."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamacli.generation.text import Token
    from llamacli.sampling import LogProbs
    from llamacli.tokenizer import Tokenizer


def colour(p: float) -> str:
    """CSS of a token of probability `p`, white for 1."""
    return f"background: hsl(8 85% {60 + 40 * p:.0f}%)"


def alternatives(tokenizer: Tokenizer, token: int, logprobs: LogProbs) -> Iterator[tuple[int, str]]:
    """Ids in the place of a token, with lines of HTML.

    The line has probability and text. A sampled token that is not among the most probable ones comes last.
    """
    shown = logprobs.top if token in dict(logprobs.top) else (*logprobs.top, (token, logprobs.chosen))
    for other, value in shown:
        yield other, f"{math.exp(value):6.1%}  {html.escape(repr(tokenizer.piece(other, unparse_special=True)))}"


def coloured(tokenizer: Tokenizer, tokens: Iterable[Token]) -> str:
    """HTML of tokens, without a style sheet.

    Tooltips show the most probable tokens in the place of each.
    """
    spans = []
    for token in tokens:
        if token.logprobs is None:
            spans.append(html.escape(token.piece))
            continue
        tip = "\n".join(line for _, line in alternatives(tokenizer, token.id, token.logprobs))
        style = f"color: black; {colour(math.exp(token.logprobs.chosen))}"
        spans.append(f'<span style="{style}" title="{tip}">{html.escape(token.piece)}</span>')
    return "".join(spans)
