"""Context manifests: segments and hashes that identify a context."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence

import attrs

from llamacli.prefix.errors import ManifestMismatchError

Tokenize = Callable[[str, bool], list[int]]
"""`tokenize(text, add_special)` returns the token ids that the model evaluates."""


def hash_token_ids(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids, 8 bytes each, little-endian, as hex."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}q", *tokens)).hexdigest()


def hash_bytes(text: str) -> str:
    """SHA-256 of a text in UTF-8, as hex."""
    return hashlib.sha256(text.encode()).hexdigest()


@attrs.frozen
class ManifestSegment:
    """Segment with byte and token ranges; `stable` ones make up the prefix."""

    kind: str
    stable: bool
    byte_start: int
    byte_end: int
    byte_hash: str
    token_start: int
    token_end: int
    token_hash: str


@attrs.frozen
class ContextManifest:
    """Identity and contents of a context.

    A manifest of defaults only ("zero") is compatible with any.

    - Identity: `profile_id`, `backend`, `backend_version`, `model_digest`, `prompt_format`, `prompt_template_digest`,
      `runtime_digest`, `add_bos`.
    - Contents: sizes in bytes, hashes of the stable and volatile parts, and the segments.
    """

    profile_id: str = ""
    backend: str = ""
    backend_version: str = ""
    model_digest: str = ""
    prompt_format: str = ""
    prompt_template_digest: str = ""
    runtime_digest: str = ""
    add_bos: bool = False
    stable_bytes: int = 0
    total_bytes: int = 0
    stable_byte_hash: str = ""
    stable_token_hash: str = ""
    volatile_token_hash: str = ""
    segments: tuple[ManifestSegment, ...] = ()

    @property
    def is_zero(self) -> bool:
        """True if all fields are defaults."""
        return self == ContextManifest()

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest as hex; "" if it is zero."""
        if self.is_zero:
            return ""
        return hashlib.sha256(json.dumps(attrs.asdict(self), sort_keys=True).encode()).hexdigest()

    def difference(self, other: ContextManifest) -> str:
        """First identity field that differs, else ""; zero manifests equal any."""
        if self.is_zero or other.is_zero:
            return ""
        return next((name for name in _IDENTITY if getattr(self, name) != getattr(other, name)), "")

    def check(self, text: str, tokenize: Tokenize) -> None:
        """Raise ManifestMismatchError unless the segments match the text.

        Segments must cover the text, stable ones first. Segments must be contiguous, begin and end at token boundaries,
        and match their byte and token hashes.
        """
        data, tokens = text.encode(), tokenize(text, self.add_bos)
        at_byte = at_token = 0
        was_stable = True
        for segment in self.segments:
            if segment.stable and not was_stable:
                raise ManifestMismatchError(f"stable segment {segment.kind!r} comes after a volatile one")
            if (segment.byte_start, segment.token_start) != (at_byte, at_token):
                raise ManifestMismatchError(f"segment {segment.kind!r} does not begin at the end of the previous one")
            at_byte, at_token, was_stable = segment.byte_end, segment.token_end, segment.stable
            piece = data[segment.byte_start : segment.byte_end].decode(errors="replace")
            ids = tokens[segment.token_start : segment.token_end]
            if tokenize(data[:at_byte].decode(errors="replace"), self.add_bos) != tokens[:at_token]:
                raise ManifestMismatchError(f"segment {segment.kind!r} ends within a token")
            if (hash_bytes(piece), hash_token_ids(ids)) != (segment.byte_hash, segment.token_hash):
                raise ManifestMismatchError(f"segment {segment.kind!r} does not match its hashes")
        if self.segments and (at_byte, at_token) != (len(data), len(tokens)):
            raise ManifestMismatchError("the segments do not cover the text")


_IDENTITY = (
    "profile_id", "backend", "backend_version", "model_digest", "prompt_format", "prompt_template_digest",
    "runtime_digest", "add_bos",
)  # fmt: skip


def build_manifest(
    pieces: Sequence[tuple[str, bool, str]], tokenize: Tokenize, identity: ContextManifest | None = None
) -> ContextManifest:
    """Build the manifest of a context.

    Pieces are (kind, stable, text), stable ones first. `identity` gives the identity fields, see
    `PrefixSession.identity`. Raises ManifestMismatchError if a piece ends within a token, or a stable piece follows a
    volatile one.
    """
    identity = identity or ContextManifest()
    text, tokens, segments = "", list[int](), list[ManifestSegment]()
    for kind, stable, piece in pieces:
        start = len(text.encode())
        text += piece
        whole = tokenize(text, identity.add_bos)
        if whole[: len(tokens)] != tokens:
            raise ManifestMismatchError(f"segment {kind!r} begins within a token")
        ids = whole[len(tokens) :]
        segments.append(
            ManifestSegment(
                kind, stable, start, len(text.encode()), hash_bytes(piece), len(tokens), len(whole), hash_token_ids(ids)
            )
        )
        tokens = whole
    n_stable = max((segment.token_end for segment in segments if segment.stable), default=0)
    stable_text = "".join(piece for _, stable, piece in pieces if stable)
    manifest = attrs.evolve(
        identity,
        stable_bytes=len(stable_text.encode()),
        total_bytes=len(text.encode()),
        stable_byte_hash=hash_bytes(stable_text),
        stable_token_hash=hash_token_ids(tokens[:n_stable]),
        volatile_token_hash=hash_token_ids(tokens[n_stable:]),
        segments=tuple(segments),
    )
    manifest.check(text, tokenize)
    return manifest
