"""What a context is made of, so that whoever reuses one can tell that it is the same."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence

import attrs

from llamacli.errors import ManifestMismatchError

Tokenize = Callable[[str, bool], list[int]]
"""`tokenize(text, add_special)`: the exact tokens of a model's."""


def hash_token_ids(tokens: Sequence[int]) -> str:
    """SHA-256 over the ids, 8 bytes each, little-endian, as hex."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}q", *tokens)).hexdigest()


def hash_bytes(text: str) -> str:
    """SHA-256 over the text's UTF-8, as hex."""
    return hashlib.sha256(text.encode()).hexdigest()


@attrs.frozen
class ManifestSegment:
    """A piece of a context: its `kind`, whether it is `stable`, and where it lies in bytes and in tokens."""

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
    """The identity of a context. One of defaults only, zero, is compatible with any.

    Who computed it (`profile_id`, `backend` and its version, `model_digest`, `prompt_format`, the digests of the
    template and of the runtime, `add_bos`), and what it holds: how many bytes, hashes, and the segments.
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
        """Whether it says nothing."""
        return self == ContextManifest()

    @property
    def digest(self) -> str:
        """SHA-256 of it as JSON, as hex; "" if it is zero."""
        if self.is_zero:
            return ""
        return hashlib.sha256(json.dumps(attrs.asdict(self), sort_keys=True).encode()).hexdigest()

    def difference(self, other: ContextManifest) -> str:
        """Which part of who computed it is another, or "": contexts of the same may be compared token by token."""
        if self.is_zero or other.is_zero:
            return ""
        return next((name for name in _IDENTITY if getattr(self, name) != getattr(other, name)), "")

    def check(self, text: str, tokenize: Tokenize) -> None:
        """Raise ManifestMismatchError unless the segments follow one another, stable ones first, over all of the text.

        Each must begin and end where a token does, and have the bytes and tokens that its hashes say.
        """
        data, tokens = text.encode(), tokenize(text, self.add_bos)
        at_byte = at_token = 0
        was_stable = True
        for segment in self.segments:
            if segment.stable and not was_stable:
                raise ManifestMismatchError(f"stable segment {segment.kind!r} comes after one that is not")
            if (segment.byte_start, segment.token_start) != (at_byte, at_token):
                raise ManifestMismatchError(f"segment {segment.kind!r} does not begin where the one before it ends")
            at_byte, at_token, was_stable = segment.byte_end, segment.token_end, segment.stable
            piece = data[segment.byte_start : segment.byte_end].decode(errors="replace")
            ids = tokens[segment.token_start : segment.token_end]
            if tokenize(data[:at_byte].decode(errors="replace"), self.add_bos) != tokens[:at_token]:
                raise ManifestMismatchError(f"segment {segment.kind!r} ends within a token")
            if (hash_bytes(piece), hash_token_ids(ids)) != (segment.byte_hash, segment.token_hash):
                raise ManifestMismatchError(f"segment {segment.kind!r} has another content than its hashes")
        if self.segments and (at_byte, at_token) != (len(data), len(tokens)):
            raise ManifestMismatchError("the segments do not cover the text")


_IDENTITY = (
    "profile_id", "backend", "backend_version", "model_digest", "prompt_format", "prompt_template_digest",
    "runtime_digest", "add_bos",
)  # fmt: skip


def build_manifest(
    pieces: Sequence[tuple[str, bool, str]], tokenize: Tokenize, identity: ContextManifest | None = None
) -> ContextManifest:
    """The manifest of a context made of (kind, stable, text), stable ones first; `identity` says who computes it.

    Raises ManifestMismatchError if a piece ends within a token, or a stable one comes after one that is not.
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
