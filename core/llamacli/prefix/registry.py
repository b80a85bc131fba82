"""Registry of the session factory and the embedding function.

Programs can replace both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from llamacli.model import load_model
from llamacli.prefix.errors import SessionUnavailableError
from llamacli.prefix.session import PrefixConfig, PrefixSession, checked_threads

Path = str | os.PathLike[str]
SessionFactory = Callable[[Path, PrefixConfig], PrefixSession]
EmbedFunction = Callable[[Path, PrefixConfig, str], Sequence[float]]


def _open_session(path: Path, config: PrefixConfig) -> PrefixSession:
    return PrefixSession(load_model(path, threads=checked_threads(config)), config)


def _embed_text(path: Path, config: PrefixConfig, text: str) -> Sequence[float]:
    from llamacli.tools.embedding import load_embedder

    with load_embedder(path, threads=checked_threads(config)) as embedder:
        vector: list[float] = embedder.embed(embedder.tokenizer.encode(text)).tolist()
        return vector


_session_factory: SessionFactory | None = _open_session
_embed_function: EmbedFunction | None = _embed_text


def session_available() -> bool:
    """Check that a session factory is registered."""
    return _session_factory is not None


def set_session_factory(factory: SessionFactory | None) -> None:
    """Register the function that `new_session` calls; None removes it."""
    global _session_factory
    _session_factory = factory


def new_session(path: Path, config: PrefixConfig | None = None) -> PrefixSession:
    """Create a session for a model file; SessionUnavailableError without a factory."""
    if _session_factory is None:
        raise SessionUnavailableError("no session factory is registered")
    return _session_factory(path, config or PrefixConfig())


def embed_available() -> bool:
    """Check that an embedding function is registered."""
    return _embed_function is not None


def set_embed_function(function: EmbedFunction | None) -> None:
    """Register the function that `embed` calls; None removes it."""
    global _embed_function
    _embed_function = function


def embed(path: Path, text: str, config: PrefixConfig | None = None) -> Sequence[float]:
    """Embed a text with a model file; SessionUnavailableError without a function."""
    if _embed_function is None:
        raise SessionUnavailableError("no embedding function is registered")
    return _embed_function(path, config or PrefixConfig(), text)
