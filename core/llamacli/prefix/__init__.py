"""Warm prefix sessions: a prompt's stable start stays evaluated while what follows it comes and goes."""

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
    "ContextManifest",
    "ContextReport",
    "DecodeConfig",
    "ManifestSegment",
    "PrefixConfig",
    "PrefixSession",
    "PrefixStatus",
    "StreamChunk",
    "SuffixStatus",
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
