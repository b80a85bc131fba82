"""`llamacli quantize`: a model's file with its tensors in other types."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamacli.cli.options import PATH, global_options, threads_option
from llamacli.cli.output import human_bytes, print_table, printable
from llamacli.cli.progress import bar, compiling
from llamacli.errors import InvalidRequestError

if TYPE_CHECKING:
    from llamacli.conversion import Plan, PlannedTensor

_log = logging.getLogger(__name__)


@click.command()
@click.argument("model", type=PATH)
@click.argument("out", type=PATH)
@click.argument("kind", metavar="TYPE")
@click.option("--pure", is_flag=True, help="Give all weights the same type, instead of a mixture.")
@click.option("--allow-requantize", is_flag=True, help="Quantise weights that are quantised already, at a loss.")
@click.option("--force", is_flag=True, help="Overwrite OUT if it is there.")
@click.option("--dry-run", is_flag=True, help="Only show what would be written.")
@threads_option
@global_options
def quantize(
    model: str,
    out: str,
    kind: str,
    pure: bool,
    allow_requantize: bool,
    force: bool,
    dry_run: bool,
    threads: int | None,
) -> None:
    """Write MODEL, a GGUF file, to the file OUT with its weights in TYPE.

    TYPE is F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q6_K, or one of the mixtures Q3_K_S, Q3_K_M, Q3_K_L,
    Q4_K_S, Q4_K_M, Q5_K_S, Q5_K_M, which mean what they mean in llama.cpp; Q3_K, Q4_K and Q5_K are short for the ones
    that end in M. Q4_K_M is a good choice. Scales are chosen by the error of the weights alone: there is no importance
    matrix.

    Of a split model any file may be named; OUT is one file. Norms and routers stay as they are, and so does all
    metadata but what tells the type. OUT is complete or not there: an interrupted run leaves nothing behind.
    """
    if not os.path.basename(out):
        raise click.BadParameter(f"{out!r} is no file's name.", param_hint="OUT")
    from llamacli.conversion import file_type, plan, write
    from llamacli.engine import jit_disabled
    from llamacli.gguf import open_gguf
    from llamacli.util.files import check_target

    try:
        wanted = file_type(kind)
    except InvalidRequestError as error:
        raise click.BadParameter(f"{error}.", param_hint="TYPE") from None
    if not dry_run:
        if Path(out).is_file() and not force:
            raise InvalidRequestError(f"{out} is there already: --force overwrites it")
        check_target(Path(out), overwrite=force)
    with open_gguf(model) as file:
        planned = plan(file, wanted, pure=pure)
        _check_requantizing(planned, allow_requantize)
        _warn_of_fallbacks(planned)
        if not dry_run:
            if jit_disabled() and planned.needs_kernels:
                raise InvalidRequestError(
                    "NUMBA_DISABLE_JIT is set, which forbids to compile the kernels that quantise"
                )
            with bar(f"writing {Path(out).name}", human_bytes) as progress, compiling():
                write(planned, Path(out), threads=threads, overwrite=force, progress=progress)
        _print_types(planned, out)


def _check_requantizing(planned: Plan, allowed: bool) -> None:
    again = planned.requantized
    if not again:
        return
    first = again[0].source
    found = f"{len(again)} tensors are quantised already, {first.name!r} as {first.type.name}"
    if not allowed:
        raise InvalidRequestError(
            f"{planned.file.path}: {found}; start from an F32, F16 or BF16 file, or add --allow-requantize"
        )
    _log.warning("%s: quantising them again loses more than quantising the original", found)


def _warn_of_fallbacks(planned: Plan) -> None:
    """One line for all tensors of one width."""
    groups: dict[tuple[int, str, str], list[PlannedTensor]] = {}
    for tensor in planned.tensors:
        if tensor.fell_back:
            key = tensor.source.shape[-1], tensor.wanted.name, tensor.target.type.name
            groups.setdefault(key, []).append(tensor)
    for (width, wanted, got), tensors in groups.items():
        others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        _log.warning("%s%s: rows of %d do not fit %s, so %s", tensors[0].source.name, others, width, wanted, got)


def _print_types(planned: Plan, out: str) -> None:
    """How many tensors have which type, the largest share first, and the sum."""
    n_tensors: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    for tensor in planned.tensors:
        n_tensors[tensor.target.type.name] += 1
        n_bytes[tensor.target.type.name] += tensor.target.n_bytes
    print_table(
        ("type", "tensors:", "size:"),
        [(name, str(n_tensors[name]), human_bytes(size)) for name, size in n_bytes.most_common()],
    )
    before = sum(tensor.source.n_bytes for tensor in planned.tensors)
    bits = f", {8 * planned.n_bytes / planned.n_params:.2f} bits a weight" if planned.n_params else ""
    click.echo(
        printable(f"{out}: {planned.file_type.name}, {human_bytes(planned.n_bytes)} of {human_bytes(before)}{bits}")
    )
