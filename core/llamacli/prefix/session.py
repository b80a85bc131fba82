"""A session whose context is a prefix that stays, a suffix that comes and goes, and what was generated."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import attrs

from llamacli.architecture import MAX_CONTEXT
from llamacli.errors import (
    CancelledError,
    ContextOverflowError,
    InvalidRequestError,
    LlamaCliError,
    ManifestMismatchError,
    SessionClosedError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from llamacli.kv import KVSequence
from llamacli.kv.prefixes import n_common
from llamacli.model import Model
from llamacli.prefix.manifest import ContextManifest, hash_bytes, hash_token_ids
from llamacli.sampling import SamplingParams
from llamacli.util.closing import Closing
from llamacli.util.numbers import is_integer

Number = TypeVar("Number", int, float)


@runtime_checkable
class Cancel(Protocol):
    """What says that somebody no longer waits, such as a threading.Event."""

    def is_set(self) -> bool:
        """Whether to stop."""


def _or(default: int, n: int) -> int:
    if not is_integer(n):
        raise InvalidRequestError(f"{n!r} is no integer; 0 stands for {default}")
    return int(n) if n > 0 else default


def _batch(n: int) -> int:
    return _or(512, n)


def _tokens(n: int) -> int:
    return _or(256, n)


def _even(n: int) -> int:
    n_ctx = _or(8192, n) // 2 * 2
    if not 0 < n_ctx <= MAX_CONTEXT:
        raise InvalidRequestError(f"num_ctx must be 0 or from 2 to {MAX_CONTEXT}, not {n}")
    return n_ctx


@attrs.frozen
class PrefixConfig:
    """What a session is made for; 0 or "" stands for a default.

    - `num_ctx`: tokens of context (8192), made even. `num_batch`: tokens evaluated at a time (512). `num_threads`: 0
      for one a core.
    - `num_gpu_layers`, `tensor_split`: nothing but 0 is supported. `flash_attn`: attention is of that kind always.
    - `kv_cache_type`: one of `llamacli.kv.KV_TYPES`.
    - `prompt_format`, `prompt_template_digest`: how the text that is handed over was made, part of its identity.
    - `disable_bos`: put no BOS before a prefix, where the model has one.
    """

    num_ctx: int = attrs.field(default=0, converter=_even)
    num_batch: int = attrs.field(default=0, converter=_batch)
    num_threads: int = 0
    num_gpu_layers: int = 0
    tensor_split: tuple[float, ...] = ()
    flash_attn: bool = False
    kv_cache_type: str = ""
    prompt_format: str = ""
    prompt_template_digest: str = ""
    disable_bos: bool = False

    def __attrs_post_init__(self) -> None:
        if not is_integer(self.num_threads):
            raise InvalidRequestError(f"num_threads must be an integer, not {self.num_threads!r}")
        if self.num_gpu_layers or any(self.tensor_split):
            raise UnsupportedFeatureError("GPU layers: this runs on CPUs")


@attrs.frozen
class DecodeConfig:
    """How to generate: up to `max_tokens` (256); None stands for a default, 0 means 0."""

    max_tokens: int = attrs.field(default=0, converter=_tokens)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def params(self) -> SamplingParams:
        """The parameters of the sampler."""

        def given(value: Number | None, default: Number) -> Number:
            return default if value is None else value

        return SamplingParams(
            temp=given(self.temperature, 0.8), top_p=given(self.top_p, 0.9), top_k=given(self.top_k, 40), min_p=0.05
        )


@attrs.frozen
class StreamChunk:
    """A piece of generated text; with an `error`, the end."""

    text: str = ""
    error: Exception | None = None


@attrs.frozen
class PrefixStatus:
    """How a prefix was made resident, in tokens: `reused`, `prefilled`, `dropped` of what was there; what is now."""

    reused: int
    prefilled: int
    dropped: int
    prefix: int
    resident: int
    available: int
    byte_hash: str
    token_hash: str
    manifest_digest: str


@attrs.frozen
class SuffixStatus:
    """What a suffix came to, in tokens."""

    suffix: int
    prefix: int
    resident: int
    available: int
    manifest_digest: str


@attrs.frozen
class ContextReport:
    """What a session holds, also after it is closed."""

    resident: int
    prefix: int
    num_ctx: int
    available: int
    byte_hash: str
    token_hash: str
    manifest_digest: str
    manifest: ContextManifest
    closed: bool


class PrefixSession(Closing):
    """One context over a model, used by one thread at a time.

    A failure of the engine poisons it: every later call raises SessionFatalError with the first cause. After `close`
    all but `explain_context` and `close` raise SessionClosedError.
    """

    def __init__(self, model: Model, config: PrefixConfig | None = None):
        self.model, self.config = model, config or PrefixConfig()
        formats = {fmt.name for fmt in model.chat_formats()}
        if self.config.prompt_format and self.config.prompt_format not in formats:
            raise UnsupportedFeatureError(f"prompt format {self.config.prompt_format!r}")
        self._session = model.create_session(
            seq_len=self.config.num_ctx, kv_type=self.config.kv_cache_type or None, seed=0
        )
        self._prefix: list[int] = []
        self._prefix_text = ""
        self._text: str | None = ""  # of the whole context, as long as all of it was handed over as text
        self._manifest = ContextManifest()
        self._fatal: SessionFatalError | None = None
        self._report: ContextReport | None = None
        self._mark: KVSequence | None = None  # where the prefix ends, for sliding windows to come back to

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        """The tokens that a text is evaluated as; `add_special` puts BOS first where the model expects it."""
        tokens = self.model.encode(text, add_special=add_special, parse_special=True)
        return tokens[:-1] if add_special and self.model.tokenizer.add_eos else tokens

    def identity(self, profile_id: str = "") -> ContextManifest:
        """Who computes this session's contexts, for `build_manifest` to say what one is made of."""
        config = self.config
        runtime = f"{self.model.mode.value} {self._session.cache.kv_type}"
        return ContextManifest(
            profile_id=profile_id,
            backend="llamacli",
            backend_version=importlib.metadata.version("llamacli"),
            model_digest=self.model.identity,
            prompt_format=config.prompt_format,
            prompt_template_digest=config.prompt_template_digest,
            runtime_digest=hash_bytes(runtime),
            add_bos=self.model.tokenizer.add_bos and not config.disable_bos,
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that is resident."""
        return self._session.tokens

    def ensure_prefix(
        self, text: str, manifest: ContextManifest | None = None, *, cancel: Cancel | None = None
    ) -> PrefixStatus:
        """Let the context be this prefix and nothing else, evaluating what it does not begin with already.

        A manifest of another identity than before drops all that was there. Raises ContextOverflowError before anything
        changes, ManifestMismatchError likewise if the manifest is not of this text, CancelledError with the context
        rolled back to what was reused.
        """
        self._expect_open(cancel)
        manifest = manifest or ContextManifest()
        tokens = self.tokenize(text, not self.config.disable_bos)
        self._check_text(manifest, text, tokens)
        if len(tokens) > self.config.num_ctx:
            raise ContextOverflowError(0, len(tokens), self.config.num_ctx, stage="prefix")
        before = self.tokens
        common = 0 if self._manifest.difference(manifest) else n_common(before, tuple(tokens))
        kept = self._rewind(common)
        if kept < common:
            kept = self._session.reuse(tokens)
        self._prefix, self._prefix_text, self._text, self._manifest = tokens[:kept], "", None, manifest
        self._evaluate(tokens[kept:], cancel)
        reused = min(common, kept)
        if self._session.cache.pool.layout.has_windows:
            self._mark = self._session.mark()
        self._prefix, self._prefix_text, self._text = tokens, text, text
        return PrefixStatus(
            reused, len(tokens) - reused, len(before) - reused, len(tokens), len(self.tokens), self._available,
            hash_bytes(text), hash_token_ids(tokens), manifest.digest,
        )  # fmt: skip

    def prefill_suffix(
        self, text: str, manifest: ContextManifest | None = None, *, cancel: Cancel | None = None
    ) -> SuffixStatus:
        """Append text to the context; calls one after the other add up.

        Prefix and suffix have the tokens that the whole text has, if the suffix begins where a token does. Raises
        ManifestMismatchError if the manifest is of another identity or another stable text than the prefix's, or the
        suffix begins within a token of the whole; ContextOverflowError; both before anything changes; CancelledError
        with the context as it was.
        """
        self._expect_open(cancel)
        manifest = manifest or ContextManifest()
        self._check_prefix(manifest)
        tokens = self._suffix_tokens(text, must_fit=not manifest.is_zero)
        if len(self.tokens) + len(tokens) > self.config.num_ctx:
            raise ContextOverflowError(len(self.tokens), len(tokens), self.config.num_ctx, stage="suffix")
        self._evaluate(tokens, cancel)
        self._text = None if self._text is None else self._text + text
        said = self._manifest if manifest.is_zero else manifest
        return SuffixStatus(len(tokens), len(self._prefix), len(self.tokens), self._available, said.digest)

    def decode(self, config: DecodeConfig | None = None, *, cancel: Cancel | None = None) -> Iterator[StreamChunk]:
        """Stream what the model makes of the context; what is generated becomes part of it.

        It ends at an end-of-generation token, which is neither shown nor kept, or when the context is full. An error
        that comes while it goes on is the last chunk. Raises ContextOverflowError at once if there is nothing to go on
        from, or no room.
        """
        self._expect_open(cancel)
        n = len(self.tokens)
        if not n or n >= self.config.num_ctx:
            raise ContextOverflowError(n, 1, self.config.num_ctx, stage="decode")
        config = config or DecodeConfig()
        return self._decode(config, config.params(), cancel)

    def explain_context(self) -> ContextReport:
        """What the context holds."""
        if self._report is not None:
            return self._report
        if self._fatal is not None:
            raise self._fatal
        return self._describe(closed=False)

    def close(self) -> None:
        """Give the memory back; closing twice does nothing."""
        if self._report is None:
            self._report = self._describe(closed=True)
            self._session.close()
            self._mark = None

    def _decode(self, config: DecodeConfig, params: SamplingParams, cancel: Cancel | None) -> Iterator[StreamChunk]:
        session = self._session
        self._text = None
        try:
            if not session.has_logits:  # the last token again: a prefix that was there already evaluated nothing
                self._replay()
            session.set_seed(int.from_bytes(os.urandom(4)) if config.seed is None else config.seed)
            for token in session.generate([], params, max_tokens=config.max_tokens):
                if cancel is not None and cancel.is_set():
                    raise CancelledError("cancelled while generating")
                yield StreamChunk(token.piece)
        except LlamaCliError as error:
            yield StreamChunk(error=error)
        except Exception as error:
            self._fatal = SessionFatalError(error)
            yield StreamChunk(error=self._fatal)

    def _replay(self) -> None:
        *rest, last = self.tokens
        self._session.rewind(len(rest))
        self._session.eval([last])

    def _rewind(self, n: int) -> int:
        """Keep the first n tokens, or none where a sliding window has forgotten too much; how many are left."""
        if n < len(self.tokens):
            self._session.rewind(n)
            if len(self._session.cache.tokens) < n:
                self._session.rewind(0)
        return len(self.tokens)

    def _evaluate(self, tokens: Sequence[int], cancel: Cancel | None) -> None:
        """Evaluate in batches. What is raised in between leaves the context as it was."""
        start = len(self.tokens)
        try:
            for at in range(0, len(tokens), self.config.num_batch):
                if cancel is not None and cancel.is_set():
                    raise CancelledError(f"cancelled after {at} of {len(tokens)} tokens")
                self._session.eval(tokens[at : at + self.config.num_batch])
        except (CancelledError, KeyboardInterrupt):
            self._session.rewind(start)
            raise
        except Exception as error:
            self._fatal = SessionFatalError(error)
            raise self._fatal from error

    def _suffix_tokens(self, text: str, *, must_fit: bool) -> list[int]:
        has_bos = not self.config.disable_bos
        if self._text is not None:
            whole, held = self.tokenize(self._text + text, has_bos), list(self.tokens)
            if whole[: len(held)] == held:
                return whole[len(held) :]
            if must_fit:
                raise ManifestMismatchError("the suffix begins within a token of the whole text")
        return self.tokenize(text, has_bos and not self.tokens)

    def _check_text(self, manifest: ContextManifest, text: str, tokens: Sequence[int]) -> None:
        if manifest.is_zero:
            return
        if manifest.stable_byte_hash and manifest.stable_byte_hash != hash_bytes(text):
            raise ManifestMismatchError("the prefix is another text than its manifest's stable one")
        if manifest.stable_token_hash and manifest.stable_token_hash != hash_token_ids(tokens):
            raise ManifestMismatchError("the prefix has other tokens than its manifest says")

    def _check_prefix(self, manifest: ContextManifest) -> None:
        if manifest.is_zero or self._manifest.is_zero:
            return
        difference = self._manifest.difference(manifest)
        if difference:
            raise ManifestMismatchError(f"{difference} is another than the prefix's")
        for name in ("stable_byte_hash", "stable_token_hash"):
            if getattr(manifest, name) != getattr(self._manifest, name):
                raise ManifestMismatchError(f"{name} is another than the prefix's")

    @property
    def _available(self) -> int:
        return self.config.num_ctx - len(self.tokens)

    def _describe(self, *, closed: bool) -> ContextReport:
        return ContextReport(
            len(self.tokens), len(self._prefix), self.config.num_ctx, self._available, hash_bytes(self._prefix_text),
            hash_token_ids(self._prefix), self._manifest.digest, self._manifest, closed,
        )  # fmt: skip

    def _expect_open(self, cancel: Cancel | None) -> None:
        if self._report is not None:
            raise SessionClosedError("the prefix session is closed")
        if self._fatal is not None:
            raise self._fatal
        if cancel is not None and not isinstance(cancel, Cancel):
            raise InvalidRequestError(f"cancel has no is_set: {cancel!r}")


def checked_threads(config: PrefixConfig) -> int | None:
    """How many threads a model is to be loaded with; None for one a core."""
    return int(config.num_threads) if config.num_threads > 0 else None
