"""`llamacli quantize`: convert the tensors of a model file to other types."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamacli.cli.command import Command
from llamacli.cli.hub import resolve_model
from llamacli.cli.numbers import ByteSize, Integer
from llamacli.cli.options import PATH, global_options, option, threads_option
from llamacli.cli.output import human_bytes, note, print_table, printable
from llamacli.cli.progress import bar
from llamacli.errors import InvalidRequestError

if TYPE_CHECKING:
    from llamacli.conversion import Plan, PlannedTensor

_log = logging.getLogger(__name__)

COPY = "COPY"
"""TYPE that keeps types and metadata of the file."""


def complete_type(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[str]:
    """Types that begin as typed."""
    from llamacli.conversion import FILE_TYPES

    return [name for name in (*FILE_TYPES, COPY) if name.startswith(typed.upper())]


@click.command(cls=Command)
@click.argument("model", type=PATH)
@click.argument("out", type=PATH)
@click.argument("kind", metavar="TYPE", required=False, shell_complete=complete_type)
@option("--imatrix", metavar="FILE", type=PATH, help="Importance matrix, from `llamacli imatrix` or llama.cpp.")
@option("--tensor-type", metavar="NAME=TYPE", multiple=True, help="Type of tensors whose names hold the regex NAME.")
@option("--pure", is_flag=True, help="Use one type for all weights, instead of a mixture.")
@option("--allow-requantize", is_flag=True, help="Quantize weights that are already quantized, which loses precision.")
@option("--keep-split", is_flag=True, help="Write as many shards as MODEL has, with the same tensors.")
@option("--split-max-tensors", metavar="N", type=Integer(1), help="Write shards of at most N tensors.")
@option("--split-max-size", metavar="SIZE", type=ByteSize(), help="Write shards of at most SIZE bytes, such as 4G.")
@option("--force", is_flag=True, help="Overwrite OUT if it exists.")
@option("--dry-run", is_flag=True, help="Show the resulting types and sizes without writing.")
@threads_option
@global_options
def quantize(
    model: str,
    out: str,
    kind: str | None,
    imatrix: str | None,
    tensor_type: tuple[str, ...],
    pure: bool,
    allow_requantize: bool,
    keep_split: bool,
    split_max_tensors: int | None,
    split_max_size: int | None,
    force: bool,
    dry_run: bool,
    threads: int | None,
) -> None:
    """Quantize the weights of a GGUF file to another type.

    Reads MODEL and writes OUT with its weights in TYPE.

    TYPE is F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q6_K, NVFP4, or one of llama.cpp's mixtures Q2_K_S,
    Q3_K_S, Q3_K_M, Q3_K_L, Q4_K_S, Q4_K_M, Q5_K_S, Q5_K_M, IQ4_NL, IQ4_XS, IQ3_M, IQ3_S, IQ3_XS, IQ3_XXS, IQ2_M, IQ2_S,
    IQ2_XS, IQ2_XXS, IQ1_M, IQ1_S, TQ2_0, TQ1_0, MXFP4_MOE; Q3_K, Q4_K and Q5_K are aliases for those that end in M.
    Q4_K_M is a good default. Tensor types that plugins add with a quantizer are TYPEs too.

    With --imatrix the errors of weights are weighed by the mean squares of what they are multiplied by. Q2_K_S,
    IQ3_XS, IQ3_XXS and TYPEs that begin with IQ2 or IQ1 need one.

    --tensor-type, as in attn_v=Q8_0, may be given several times; the first that fits counts.

    COPY keeps all types and metadata: it merges a split model, or splits one with the options for that.

    For a split model, MODEL is any of its files, and OUT is one file unless --keep-split or a --split-max option is
    given: then it is OUT-00001-of-00003.gguf and so on. Norms, routers and metadata other than the file
    type are copied. OUT is written atomically: an interrupted run leaves nothing behind.
    """
    if not os.path.basename(out):
        raise click.BadParameter(f"{out!r} is not a file name.", param_hint="OUT")
    with bar(f"reading {os.path.basename(model)}"):
        from llamacli.conversion import file_type, plan, read_imatrix, unchanged
        from llamacli.conversion.shards import kept_shards, shards_by_limit
        from llamacli.gguf import open_gguf
        from llamacli.plugins import installed_plugins

    installed_plugins().loaders()  # the tensor types of plugins
    if Path(model).is_dir():
        raise click.UsageError(f"{model} is a folder. Here: llamacli convert {model} {out} {kind or 'TYPE'}")
    if kind is None and not _is_type(out):
        raise click.UsageError("Missing argument 'TYPE'.")
    if kind is None:
        named = Path(model).with_suffix("").name
        raise click.UsageError(
            f"MODEL, OUT and TYPE are needed. Here: llamacli quantize {model} {named}-{out}.gguf {out}"
        )
    if sum(map(bool, (keep_split, split_max_tensors, split_max_size))) > 1:
        raise click.UsageError("--keep-split, --split-max-tensors and --split-max-size exclude each other.")
    if kind.upper() == COPY and (imatrix or tensor_type or pure):
        raise click.UsageError("COPY keeps all types: --imatrix, --tensor-type and --pure are for others.")
    try:
        wanted = None if kind.upper() == COPY else file_type(kind)
    except InvalidRequestError as error:
        if _is_type(out):
            raise click.UsageError(f"OUT comes before TYPE. Here: llamacli quantize {model} {kind} {out}") from None
        raise click.BadParameter(f"{error}.", param_hint="TYPE") from None
    overrides = [_named_type(text) for text in tensor_type]
    model = resolve_model(model)
    if not dry_run:
        check_out(out, force=force)
    importance = read_imatrix(Path(imatrix)) if imatrix else None
    with open_gguf(model) as file:
        if wanted is None:
            planned = unchanged(file, None)
        else:
            planned = plan(file, wanted, pure=pure, imatrix=importance, overrides=overrides)
            _check_requantizing(planned, allow_requantize)
        shards = kept_shards(file) if keep_split else []
        if split_max_tensors or split_max_size:
            infos = [tensor.target for tensor in planned.tensors]
            shards = shards_by_limit(infos, n_tensors=split_max_tensors or 0, n_bytes=split_max_size or 0)
        finish(planned, out, threads, force=force, dry_run=dry_run, shards=shards)


def _named_type(text: str) -> tuple[str, IntEnum]:
    """Regex and type of NAME=TYPE."""
    from llamacli.conversion import FILE_TYPES

    pattern, _, name = text.rpartition("=")
    known = {kind.type.name: kind.type for kind in FILE_TYPES.values()}
    if not pattern or name.upper() not in known:
        expected = f"expected NAME=TYPE, as in attn_v=Q8_0; types are {', '.join(known)}"
        raise click.BadParameter(f"{text!r}: {expected}.", param_hint="--tensor-type")
    return pattern, known[name.upper()]


def _is_type(text: str) -> bool:
    from llamacli.conversion import file_type

    try:
        return bool(file_type(text))
    except InvalidRequestError:
        return False


def finish(
    planned: Plan, out: str, threads: int | None, *, force: bool, dry_run: bool, shards: Sequence[int] = ()
) -> None:
    """Write the file of a plan unless `dry_run`; print its types."""
    _check_weights(planned, dry_run)
    _warn_of_fallbacks(planned)
    if not dry_run:
        try:
            _write(planned, Path(out), threads, force, shards)
        except KeyboardInterrupt:
            note(f"interrupted: {out} is not written")
            raise
    _print_types(planned, f"{out} would be" if dry_run else out)
    if shards:
        from llamacli.conversion.shards import shard_path

        names = [shard_path(Path(out), i, len(shards)) for i in (0, len(shards) - 1)]
        click.echo(printable(f"{len(shards)} shards: {names[0]} to {names[-1].name}"))


def check_out(out: str, *, force: bool) -> None:
    """Raise InvalidRequestError if OUT cannot be written."""
    from llamacli.util.files import check_target

    if Path(out).is_file() and not force:
        raise InvalidRequestError(f"{out} exists: --force overwrites it")
    check_target(Path(out), overwrite=force)


def _write(planned: Plan, path: Path, threads: int | None, overwrite: bool, shards: Sequence[int]) -> None:
    from llamacli.conversion import write
    from llamacli.engine import jit_disabled

    if jit_disabled() and planned.needs_kernels:
        raise InvalidRequestError("NUMBA_DISABLE_JIT is set, so the kernels that quantize cannot be compiled")
    with bar(f"writing {path.name}", human_bytes) as progress:
        write(planned, path, threads=threads, overwrite=overwrite, shards=shards, progress=progress)


def _check_requantizing(planned: Plan, allowed: bool) -> None:
    again = planned.requantized
    if not again:
        return
    first = again[0].source
    found = f"{len(again)} tensors are already quantized, {first.name!r} as {first.type.name}"
    if not allowed:
        raise InvalidRequestError(
            f"{planned.file.path}: {found}; start from an F32, F16 or BF16 file, or add --allow-requantize"
        )
    _log.warning("%s: quantizing them again loses more than quantizing the original", found)


def _check_weights(planned: Plan, dry_run: bool) -> None:
    try:
        planned.check_imatrix()
    except InvalidRequestError as error:
        if not dry_run:
            raise
        _log.warning("%s", error)
    if planned.imatrix and (missing := planned.unweighted):
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        _log.warning(
            "%s has no entry of %s%s: quantized with equal weights",
            planned.imatrix.path,
            missing[0].target.name,
            others,
        )


def _warn_of_fallbacks(planned: Plan) -> None:
    groups: dict[tuple[int, str, str], list[PlannedTensor]] = {}
    for tensor in planned.tensors:
        if tensor.fell_back:
            key = tensor.source.shape[-1], tensor.wanted.name, tensor.target.type.name
            groups.setdefault(key, []).append(tensor)
    for (width, wanted, got), tensors in groups.items():
        others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        _log.warning(
            "%s%s: rows of %d are not a multiple of %s blocks, using %s",
            tensors[0].source.name,
            others,
            width,
            wanted,
            got,
        )


def _print_types(planned: Plan, subject: str) -> None:
    n_tensors: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    for tensor in planned.tensors:
        n_tensors[tensor.target.type.name] += 1
        n_bytes[tensor.target.type.name] += tensor.target.n_bytes
    rows = [(name, str(n_tensors[name]), human_bytes(size)) for name, size in n_bytes.most_common()]
    print_table(("type", "tensors:", "size:"), rows)
    before = sum(tensor.source.n_bytes for tensor in planned.tensors)
    bits = f", {8 * planned.n_bytes / planned.n_params:.2f} bits per weight" if planned.n_params else ""
    sizes = f"{human_bytes(planned.n_bytes)} of {human_bytes(before)}{bits}"
    click.echo(printable(f"{subject}: {planned.file_type.name if planned.file_type else COPY}, {sizes}"))
