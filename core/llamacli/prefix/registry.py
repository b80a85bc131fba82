"""Who makes prefix sessions and embeds texts: this package, unless a program puts something else in its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from llamacli.errors import SessionUnavailableError
from llamacli.model import load_model
from llamacli.prefix.session import PrefixConfig, PrefixSession, checked_threads

Path = str | os.PathLike[str]
SessionFactory = Callable[[Path, PrefixConfig], PrefixSession]
EmbedFunction = Callable[[Path, PrefixConfig, str], Sequence[float]]


def _open(path: Path, config: PrefixConfig) -> PrefixSession:
    return PrefixSession(load_model(path, threads=checked_threads(config)), config)


def _embed(path: Path, config: PrefixConfig, text: str) -> Sequence[float]:
    from llamacli.tools.embedding import load_embedder

    with load_embedder(path, threads=checked_threads(config)) as embedder:
        vector: list[float] = embedder.embed(embedder.tokenizer.encode(text)).tolist()
        return vector


_factory: list[SessionFactory] = [_open]
_embedder: list[EmbedFunction] = [_embed]


def session_available() -> bool:
    """Whether there is a session factory."""
    return bool(_factory)


def set_session_factory(factory: SessionFactory | None) -> None:
    """Let `new_session` call this; None for nothing."""
    _factory[:] = [] if factory is None else [factory]


def new_session(path: Path, config: PrefixConfig | None = None) -> PrefixSession:
    """A session over the model of a file. Raises SessionUnavailableError if there is no factory."""
    if not _factory:
        raise SessionUnavailableError("no session factory is registered")
    return _factory[0](path, config or PrefixConfig())


def embed_available() -> bool:
    """Whether there is an embedding function."""
    return bool(_embedder)


def set_embed_function(function: EmbedFunction | None) -> None:
    """Let `embed` call this; None for nothing."""
    _embedder[:] = [] if function is None else [function]


def embed(path: Path, text: str, config: PrefixConfig | None = None) -> Sequence[float]:
    """The vector of a text by the model of a file. Raises SessionUnavailableError if there is no function for it."""
    if not _embedder:
        raise SessionUnavailableError("no embedding function is registered")
    return _embedder[0](path, config or PrefixConfig(), text)
