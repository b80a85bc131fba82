"""Output of `--logprobs` and `--html`: tokens with their alternatives."""

from __future__ import annotations

import html
import math
from importlib.resources import files
from itertools import repeat
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from llamacli.cli.output import note
from llamacli.generation.heat import alternatives, colour
from llamacli.util.files import replacing

if TYPE_CHECKING:
    from llamacli import Model
    from llamacli.cli.generate import Completion
    from llamacli.sampling import LogProbs


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


def write_heat(path: Path, model: Model, prompt: str, completion: Completion) -> None:
    """Write a page of tokens coloured by probability, atomically."""
    stream = model.tokenizer.stream(model.encode(prompt, parse_special=True))
    texts = [stream.feed(token) for token in completion.tokens]
    texts[-1:] = [texts[-1] + stream.flush()] if texts else []
    tokens = map(_token, repeat(model), completion.tokens, texts, completion.logprobs)
    mean = math.fsum(logprobs.chosen for logprobs in completion.logprobs) / max(1, len(completion.logprobs))
    template = files("llamacli").joinpath("data/heat.html.tmpl").read_text("utf-8")
    page = Template(template).substitute(
        title=html.escape(f"llamacli, {model.metadata.get('general.name') or model.arch}"),
        summary=f"{len(completion.tokens)} tokens, perplexity {math.exp(-mean):.2f}",
        scale="".join(f'<span style="{colour(p)}">{p:.0%}</span>' for p in (1.0, 0.75, 0.5, 0.25, 0.0)),
        prompt=html.escape(prompt),
        tokens="".join(tokens),
    )
    with replacing(path, overwrite=True) as file:
        file.write(page.encode())


def _token(model: Model, token: int, text: str, logprobs: LogProbs) -> str:
    """Format a token with its alternatives.

    The text of a token that ends inside a character is empty.
    """
    lines = [
        f"<b>{line}</b>" if other == token else line for other, line in alternatives(model.tokenizer, token, logprobs)
    ]
    others = '<span class="others">' + "\n".join(lines) + "</span>"
    word = text.lstrip(" ") or text  # a space at the end of a line would show its colour there
    space = text[: len(text) - len(word)]
    style = colour(math.exp(logprobs.chosen))
    return f'{space}<span class="token" tabindex="0" style="{style}">{html.escape(word)}{others}</span>'
