"""`llamacli trace`: ops of a forward pass, compared with llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from llamacli.cli.command import Command
from llamacli.cli.numbers import IntList
from llamacli.cli.options import PATH, global_options
from llamacli.cli.output import print_json, print_table
from llamacli.cli.progress import working

if TYPE_CHECKING:
    from llamacli.media.encoder import Medium
    from llamacli.tools.op_values import Match, OpRecord

_N_NUMBERS = 3


@click.command(cls=Command)
@click.argument("model", type=PATH)
@click.option("-p", "--prompt", metavar="TEXT", help="Text to evaluate.")
@click.option("--tokens", type=IntList(1 << 30), help="Token ids to evaluate instead. Default: 0,1,2,3.")
@click.option("--image", metavar="FILE", type=PATH, help="Picture for the encoder of a mmproj file; implies --values.")
@click.option("--audio", metavar="FILE", type=PATH, help="Sound likewise.")
@click.option("--values", is_flag=True, help="Run the ops, in NumPy, and show the norm and first numbers of each.")
@click.option("--against", metavar="DUMP", type=PATH, help="Output of llama-eval-callback to compare with.")
@click.option("--json", is_flag=True, help="Print JSON.")
@global_options
def trace(
    model: str,
    prompt: str | None,
    tokens: tuple[int, ...] | None,
    image: str | None,
    audio: str | None,
    values: bool,
    against: str | None,
    json: bool,
) -> None:
    """List the ops of a model's forward pass, by layer.

    With --values each op is run on a prompt. With --against DUMP, the output of llama.cpp's llama-eval-callback for the
    same tokens, the tensor with the numbers of each op is shown, and the first op that differs is marked: `=` is equal,
    `!` different, `?` without counterpart. `python -m llamacli.testing.dump MODEL --tokens 0 1 2 3` makes such a file
    with llama-cpp-python. Of a mmproj file the last tile of a picture or of sound is run, by --image FILE or --audio
    FILE, which that program takes too.
    """
    medium: Medium | None = None
    if image is not None and audio is not None:
        raise click.UsageError("--image and --audio: an encoder reads one of them.")
    if image is not None:
        from llamacli.media.pictures import Picture

        medium = Picture.of(image)
    elif audio is not None:
        from llamacli.media.sound import Sound

        medium = Sound.of(audio)
    with working("recording the forward pass"):
        from llamacli.tools.op_values import UNKNOWN, Match, Recorded, compare, first_difference, read_dump

        recorded = Recorded.of(model)
    if medium is not None and recorded.encoder is None:
        option = "--image" if image is not None else "--audio"
        raise click.UsageError(f"{option} is for the encoder of a mmproj file, and {model} is a model of text.")
    if not values and not against and medium is None:
        _print([_row(op) for op in recorded.ops], json)
        return
    if medium is None and recorded.encoder is not None:
        from llamacli.media.sound import Sound

        need = "sound: --audio FILE" if recorded.encoder.medium is Sound else "a picture: --image FILE"
        raise click.UsageError(f"The encoder of a mmproj file needs {need}.")
    with working("running the ops"):
        if medium is not None:
            found = recorded.values_of_medium(medium)
        else:
            found = recorded.values(list(tokens or range(4)) if prompt is None else recorded.encode(prompt))
    if not against:
        _print([_row(value.op) | _numbers(Match(value, None, UNKNOWN)) for value in found], json)
        return
    matches = compare(found, read_dump(against))
    difference = first_difference(matches)
    first = difference[0] if difference else None
    rows = []
    for match in matches:
        theirs = {"status": match.status, "tensor": match.tensor.name if match.tensor else None}
        numbers = {"their_first": match.tensor.numbers[:_N_NUMBERS].tolist() if match.tensor else []}
        rows.append(_row(match.values.op) | _numbers(match) | theirs | numbers | {"is_first": match is first})
    _print(rows, json)
    if not json:
        for line in _summary(difference):
            click.echo(line)


def _row(op: OpRecord) -> dict[str, Any]:
    return {"op": op.number, "layer": op.layer, "verb": op.verb, "width": op.width, "tensors": list(op.tensors)}


def _numbers(match: Match) -> dict[str, Any]:
    return {"norm": match.values.norm, "first": match.values.rows.reshape(-1)[:_N_NUMBERS].tolist()}


_SIGNS = {"equal": "=", "different": "!", "unknown": "?"}


def _print(rows: list[dict[str, Any]], json: bool) -> None:
    if json:
        print_json(rows)
        return
    columns = [name for name in rows[0] if name != "is_first"]
    print_table(tuple(columns), [tuple(_cell(name, row) for name in columns) for row in rows])


def _cell(name: str, row: dict[str, Any]) -> str:
    value = row[name]
    match name:
        case "status":
            return f"{_SIGNS[value]}{' <- first difference' if row['is_first'] else ''}"
        case "first" | "their_first":
            return " ".join(f"{number:.4f}" for number in value) or "-"
        case "norm":
            return f"{value:.4f}"
        case "tensors":
            return " ".join(value) or "-"
    return "-" if value is None else str(value)


def _summary(difference: tuple[Match, list[Match]] | None) -> Iterator[str]:
    if difference is None:
        yield "no op differs"
        return
    first, suspects = difference
    op = first.values.op
    yield f"first difference: op {op.number}, {op.verb} of {' '.join(op.tensors)}"
    if suspects:
        names = ", ".join(f"{match.values.op.verb} (op {match.values.op.number})" for match in suspects)
        yield f"possible causes, which have no equal tensor in the dump: {names}"
