"""`llamacli rank`: texts by their relevance to a query."""

from __future__ import annotations

import click

from llamacli.cli.command import Command
from llamacli.cli.embed import load
from llamacli.cli.options import PATH, global_options, lora_option, mode_option, prompts_option, threads_option
from llamacli.cli.output import print_json
from llamacli.cli.text import argument, read_stdin


@click.command(cls=Command)
@click.argument("model", type=PATH)
@click.argument("query")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@lora_option
@mode_option
@prompts_option
@threads_option
@global_options
def rank(
    model: str,
    query: str,
    texts: tuple[str, ...],
    lora: tuple[tuple[str, float], ...],
    mode: str,
    prompts: str,
    threads: int | None,
) -> None:
    """Print texts by their relevance to a query.

    MODEL is a reranker. Each TEXT is a line of JSON, the most relevant first: `index` is its place among those given,
    from 0, and `score` the larger the more relevant it is, as llama.cpp's pooling of type rank. Without TEXT, each line
    of stdin is a text.
    """
    given = [argument(text) for text in texts] or (read_stdin() or "").splitlines()
    if not given:
        raise click.UsageError("Give TEXT, or pipe lines in.")
    import numpy as np

    with load(model, mode, threads, lora, prompts) as embedder:
        scores = embedder.rank(argument(query), given)
    for index in sorted(range(len(given)), key=lambda i: -scores[i]):
        shortest = float(str(np.float32(scores[index])))  # the fewest digits that identify a float32
        print_json({"index": index, "score": shortest, "text": given[index]}, indent=None)
