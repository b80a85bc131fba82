"""`llamacli tokenize`: token ids and pieces of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llamacli.cli.command import Command
from llamacli.cli.hub import resolve_model
from llamacli.cli.options import PATH, global_options, option
from llamacli.cli.output import print_json, printable
from llamacli.cli.progress import working
from llamacli.cli.text import argument, read_stdin

if TYPE_CHECKING:
    from llamacli.tokenizer import Tokenizer


@click.command(cls=Command)
@click.argument("model", type=PATH)
@click.argument("text", required=False)
@option("--ids", is_flag=True, help="Print only the ids, as a list in one line.")
@option("--no-bos", "--no-special", "no_special", is_flag=True, help="Add no BOS and no EOS.")
@option(
    "--parse-special", is_flag=True, help="Parse special tokens in the text instead of encoding them as plain text."
)
@option("--json", is_flag=True, help="Print JSON.")
@global_options
def tokenize(model: str, text: str | None, ids: bool, no_special: bool, parse_special: bool, json: bool) -> None:
    """Print the id and the piece of each token of TEXT.

    Without TEXT, all of stdin is read, with its final newline. MODEL may be a file with a vocabulary only.
    """
    if ids and json:
        raise click.UsageError("--ids and --json exclude each other.")
    text = read_stdin() if text is None else argument(text)
    if text is None:
        raise click.UsageError("Give TEXT, or pipe it in.")
    with working("reading the vocabulary"):
        from llamacli import load_tokenizer

        tokenizer = load_tokenizer(resolve_model(model))
    tokens = tokenizer.encode(text, add_special=not no_special, parse_special=parse_special)
    if ids:
        click.echo(f"[{', '.join(map(str, tokens))}]")
        return
    if json:
        print_json([{"id": token, "piece": tokenizer.piece(token, unparse_special=True)} for token in tokens])
        return
    for token in tokens:
        click.echo(f"{token:>6} -> '{shown_piece(tokenizer, token)}'")


def shown_piece(tokenizer: Tokenizer, token: int) -> str:
    """Text of a token for a terminal; control characters are escaped."""
    piece, part = tokenizer.piece(token, unparse_special=True), tokenizer.piece_bytes(token, unparse_special=True)
    if "\ufffd" in piece and part != piece.encode():  # bytes of a character that others complete
        return "".join(f"<0x{byte:02X}>" for byte in part)
    return printable(piece.replace("\\", "\\\\"))
