"""Options of speculative decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import click

from llamacli.cli.command import in_group
from llamacli.cli.numbers import Integer
from llamacli.cli.options import PATH, option
from llamacli.cli.progress import load_draft

if TYPE_CHECKING:
    from llamacli.generation.drafting import Drafter
    from llamacli.model import Model
    from llamacli.session import Session

Decorated = TypeVar("Decorated")

DEFAULT_DRAFT, LIMIT, MTP = 16, 256, "mtp"
"""`MAX_DRAFT`, `LIMIT_DRAFT` and `MTP` of `llamacli.generation.drafters`, which takes long to import."""

OPTIONS = (
    option(
        "--lookup", is_flag=True,
        help="Draft tokens by prompt lookup (n-grams of the context); the text stays the same.",
    ),
    option(
        "-md", "--model-draft", "--draft", "draft", type=PATH,
        help="Draft tokens with a smaller model of the same vocabulary, a draft head of the model (EAGLE-3, DFlash, "
             "an assistant), or the model's own multi-token-prediction head, mtp; the text stays the same.",
    ),
    option(
        "--draft-max", metavar="N", type=Integer(1, LIMIT), default=DEFAULT_DRAFT, show_default=True,
        help="Maximum number of tokens to draft at once, with --lookup or --draft.",
    ),
)  # fmt: skip


def speculation_options(command: Decorated) -> Decorated:
    """Add `--lookup`, `--draft` and `--draft-max` to a command."""
    return in_group("Speculative decoding", *OPTIONS)(command)


def expect_one_drafter(lookup: bool, draft: str | None) -> None:
    """Raise UsageError for two drafters."""
    if lookup and draft is not None:
        raise click.UsageError("--lookup and --draft exclude each other.")


@contextlib.contextmanager
def open_drafter(
    model: Model, session: Session, lookup: bool, draft: str | None, max_tokens: int, mode: str, threads: int | None
) -> Iterator[Drafter | None]:
    """Drafter that the options ask for, or None; closes a draft model."""
    expect_one_drafter(lookup, draft)
    if draft == MTP:
        from llamacli.generation.drafters import MtpHead

        with MtpHead(model, max_tokens, n_ctx=session.n_ctx) as head:
            yield head
    elif draft is not None:
        from llamacli.generation.drafters import drafter_of

        with load_draft(model, draft, mode, threads) as found, drafter_of(found, max_tokens, session.n_ctx) as drafter:
            yield drafter
    elif lookup:
        from llamacli.generation.drafters import PromptLookup

        yield PromptLookup(max_tokens)
    else:
        yield None
