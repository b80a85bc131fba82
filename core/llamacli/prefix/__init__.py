"""Prefix caching: sessions that keep a prompt's prefix evaluated while suffixes change.

- `session`: PrefixSession, its configuration and reports.
- `manifest`: segments and hashes that identify a context.
- `registry`: replaceable session factory and embedding function.
- `errors`: exceptions of these.
"""

from llamacli.prefix.errors import (
    CancelledError,
    ManifestMismatchError,
    SessionClosedError,
    SessionFatalError,
    SessionUnavailableError,
    UnsupportedFeatureError,
)
from llamacli.prefix.manifest import ContextManifest, ManifestSegment, build_manifest, hash_bytes, hash_token_ids
from llamacli.prefix.registry import (
    embed,
    embed_available,
    new_session,
    session_available,
    set_embed_function,
    set_session_factory,
)
from llamacli.prefix.session import (
    ContextReport,
    DecodeConfig,
    PrefixConfig,
    PrefixSession,
    PrefixStatus,
    StreamChunk,
    SuffixStatus,
)

__all__ = [
    "CancelledError",
    "ContextManifest",
    "ContextReport",
    "DecodeConfig",
    "ManifestMismatchError",
    "ManifestSegment",
    "PrefixConfig",
    "PrefixSession",
    "PrefixStatus",
    "SessionClosedError",
    "SessionFatalError",
    "SessionUnavailableError",
    "StreamChunk",
    "SuffixStatus",
    "UnsupportedFeatureError",
    "build_manifest",
    "embed",
    "embed_available",
    "hash_bytes",
    "hash_token_ids",
    "new_session",
    "session_available",
    "set_embed_function",
    "set_session_factory",
]
