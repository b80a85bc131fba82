"""`llamacli embed`: text embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamacli.cli.command import Command
from llamacli.cli.hub import resolve_model
from llamacli.cli.options import PATH, global_options, lora_option, mode_option, option, prompts_option, threads_option
from llamacli.cli.output import human_bytes, print_json
from llamacli.cli.progress import bar
from llamacli.cli.text import argument, read_stdin
from llamacli.errors import InvalidRequestError

if TYPE_CHECKING:
    from llamacli import Embedder


@click.command(cls=Command)
@click.argument("model", type=PATH)
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@option(
    "--pooling", type=click.Choice(["mean", "cls", "last", "none"]),
    help="Pooling of token vectors: mean, first (cls), last, or all (none). Default: the model's, else mean.",
)  # fmt: skip
@option("--normalize/--no-normalize", default=True, help="Scale vectors to length 1; default: on.")
@lora_option
@mode_option
@prompts_option
@threads_option
@global_options
def embed(
    model: str,
    texts: tuple[str, ...],
    pooling: str | None,
    normalize: bool,
    lora: tuple[tuple[str, float], ...],
    mode: str,
    prompts: str,
    threads: int | None,
) -> None:
    """Print the embedding of each TEXT as a line of JSON.

    Its keys are `text`, `n_tokens` and `embedding`. Without TEXT, each line of stdin is a text. Vectors are the hidden
    states after the final norm, before the output layer.
    """
    given = [argument(text) for text in texts] or (read_stdin() or "").splitlines()
    if not given:
        raise click.UsageError("Give TEXT, or pipe lines in.")

    with load(model, mode, threads, lora, prompts) as embedder:
        if (pooling or embedder.pooling) == "rank":
            raise click.UsageError("The model ranks texts: use `llamacli rank`, or give --pooling for vectors.")
        number = 0
        try:
            for record in _records(embedder, given, pooling, normalize):
                print_json(record, indent=None)
                number += 1
        except InvalidRequestError as error:
            raise InvalidRequestError(f"text {number + 1}: {error}") from error


def load(
    model: str, mode: str, threads: int | None, lora: Sequence[tuple[str, float]], prompts: str = "registers"
) -> Embedder:
    """Load a model for embeddings, with a progress bar."""
    model = resolve_model(model)
    with bar(f"loading {Path(model).name}", human_bytes) as progress:
        from llamacli.tools.embedding import load_embedder

        files, scales = [file for file, _ in lora], [scale for _, scale in lora]
        return load_embedder(
            model, mode, threads=threads, progress=progress, lora_path=files, lora_scale=scales, prompts=prompts
        )


def _records(
    embedder: Embedder, texts: Sequence[str], pooling: str | None, normalize: bool
) -> Iterator[dict[str, Any]]:
    """Line of each text, as its vectors are computed."""
    from llamacli.tools.embedding import Pooling

    tokens, again = itertools.tee(map(embedder.tokenizer.encode, texts))
    found = embedder.vectors(tokens, pooling=Pooling(pooling) if pooling else None, normalize=normalize)
    for text, ids, vectors in zip(texts, again, found, strict=True):
        # The fewest digits that identify each float32.
        shortest = [[float(str(x)) for x in row] for row in vectors.reshape(-1, embedder.n_embd)]
        yield {"text": text, "n_tokens": len(ids), "embedding": shortest if vectors.ndim == 2 else shortest[0]}
