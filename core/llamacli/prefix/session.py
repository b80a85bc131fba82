"""Prefix session: cached prefix, changing suffixes, generated text."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import attrs

from llamacli.errors import ClosedError, ContextOverflowError, InvalidRequestError, LlamaCliError
from llamacli.generation.drafting import Drafter
from llamacli.kv import KVSequence
from llamacli.kv.prefixes import n_common
from llamacli.model import Model
from llamacli.prefix.errors import (
    CancelledError,
    ManifestMismatchError,
    SessionClosedError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from llamacli.prefix.manifest import ContextManifest, hash_bytes, hash_token_ids
from llamacli.sampling import SamplingParams
from llamacli.util.numbers import is_integer
from llamacli.util.settings import MAX_CONTEXT

Number = TypeVar("Number", int, float)


@runtime_checkable
class Cancel(Protocol):
    """Cancellation flag, such as a threading.Event."""

    def is_set(self) -> bool:
        """Return True to cancel the call."""


def _positive_or(default: int, n: int) -> int:
    if not is_integer(n):
        raise InvalidRequestError(f"{n!r} is not an integer; 0 means the default {default}")
    return int(n) if n > 0 else default


def _batch_size(n: int) -> int:
    return _positive_or(512, n)


def _max_tokens(n: int) -> int:
    return _positive_or(256, n)


def _context_size(n: int) -> int:
    n_ctx = _positive_or(8192, n) // 2 * 2
    if not 0 < n_ctx <= MAX_CONTEXT:
        raise InvalidRequestError(f"n_ctx must be 0 or from 2 to {MAX_CONTEXT}, not {n}")
    return n_ctx


@attrs.frozen
class PrefixConfig:
    """Configuration of a prefix session; 0 or "" means the default.

    - `n_ctx`: context size in tokens (8192), rounded down to an even number. `n_batch`: batch size in tokens (512).
      `threads`: 0 for one thread a core.
    - `n_gpu_layers`, `tensor_split`: only 0 is supported. `flash_attn`: ignored, attention is always computed so.
    - `kv_type`: one of `llamacli.kv.KV_TYPES`.
    - `prompt_format`, `prompt_template_digest`: the format of the caller's text, part of the context's identity.
    - `disable_bos`: do not add BOS before the prefix.

    Raises InvalidRequestError for a value out of range, UnsupportedFeatureError for GPU options.
    """

    n_ctx: int = attrs.field(default=0, converter=_context_size)
    n_batch: int = attrs.field(default=0, converter=_batch_size)
    threads: int = 0
    n_gpu_layers: int = 0
    tensor_split: tuple[float, ...] = ()
    flash_attn: bool = False
    kv_type: str = ""
    prompt_format: str = ""
    prompt_template_digest: str = ""
    disable_bos: bool = False

    def __attrs_post_init__(self) -> None:
        if not is_integer(self.threads):
            raise InvalidRequestError(f"threads must be an integer, not {self.threads!r}")
        if self.n_gpu_layers or any(self.tensor_split):
            raise UnsupportedFeatureError("GPU layers: only CPUs are supported")


@attrs.frozen
class DecodeConfig:
    """Generation options of a prefix session.

    Up to `max_tokens` (256) are generated, up to the first of the strings `stop`. None means the default, 0 means 0.
    """

    max_tokens: int = attrs.field(default=0, converter=_max_tokens)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()

    def params(self) -> SamplingParams:
        """Convert to sampling parameters."""

        def given(value: Number | None, default: Number) -> Number:
            return default if value is None else value

        return SamplingParams(
            temperature=given(self.temperature, 0.8),
            top_p=given(self.top_p, 0.9),
            top_k=given(self.top_k, 40),
            min_p=0.05,
            stop=self.stop,
        )


@attrs.frozen
class StreamChunk:
    """Chunk of generated text, or the `error` that ended generation."""

    text: str = ""
    error: Exception | None = None


@attrs.frozen
class PrefixStatus:
    """Result of `ensure_prefix`, in tokens.

    `reused` from the context, `prefilled` (evaluated now), `dropped` from the context; then the sizes of the prefix and
    of the resident context, and the free space. Hashes are those of the prefix.
    """

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
    """Result of `prefill_suffix`, in tokens.

    Sizes of the suffix, the prefix and the resident context, and the free space.
    """

    suffix: int
    prefix: int
    resident: int
    available: int
    manifest_digest: str


@attrs.frozen
class ContextReport:
    """Report on a session's context, also available after it is closed."""

    resident: int
    prefix: int
    n_ctx: int
    available: int
    byte_hash: str
    token_hash: str
    manifest_digest: str
    manifest: ContextManifest
    closed: bool


class PrefixSession(contextlib.AbstractContextManager["PrefixSession"]):
    """Session with a cached prefix over a model. Not thread-safe.

    After a failure of the engine, every call raises SessionFatalError with the first cause. After `close`, all methods
    but `explain_context` and `close` raise SessionClosedError.
    """

    def __init__(self, model: Model, config: PrefixConfig | None = None):
        self.model, self.config = model, config or PrefixConfig()
        self._prompt_format = _format_name(model, self.config.prompt_format)
        self._session = model.create_session(n_ctx=self.config.n_ctx, kv_type=self.config.kv_type or None, seed=0)
        self._prefix: list[int] = []
        self._prefix_text = ""
        self._text: str | None = ""  # of the whole context; None if parts of it were generated
        self._manifest = ContextManifest()
        self._fatal: SessionFatalError | None = None
        self._report: ContextReport | None = None
        self._checkpoint: KVSequence | None = None  # the prefix's end, with the cells of sliding windows

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        """Tokenize a text, parsing special tokens.

        `add_special` adds BOS if the model expects it, never EOS.
        """
        self._expect_open()
        if add_special:
            return self.model.tokenizer.encode_prompt(text, parse_special=True)
        return self.model.encode(text, add_special=False, parse_special=True)

    def identity(self, profile_id: str = "") -> ContextManifest:
        """Manifest with this session's identity fields, for `build_manifest`."""
        self._expect_open()
        config = self.config
        runtime = f"{self.model.mode.value} {self._session.cache.kv_type}"
        return ContextManifest(
            profile_id=profile_id,
            backend="llamacli",
            backend_version=importlib.metadata.version("llamacli-core"),
            model_digest=self.model.identity,
            prompt_format=self._prompt_format,
            prompt_template_digest=config.prompt_template_digest,
            runtime_digest=hash_bytes(runtime),
            add_bos=self.model.tokenizer.add_bos and not config.disable_bos,
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the resident context."""
        self._expect_open()
        return self._session.tokens

    def ensure_prefix(
        self, text: str, manifest: ContextManifest | None = None, *, cancel: Cancel | None = None
    ) -> PrefixStatus:
        """Make the context exactly this prefix.

        Only what follows the common prefix of tokens is evaluated. A manifest of another identity than before drops the
        whole context. Raises ContextOverflowError if the prefix does not fit and ManifestMismatchError if the manifest
        is not of this text, both before anything changes; CancelledError with the context truncated to the reused
        tokens.
        """
        self._expect_open(cancel)
        manifest = manifest or ContextManifest()
        tokens = self.tokenize(text, not self.config.disable_bos)
        self._check_text(manifest, text, tokens)
        if len(tokens) > self.config.n_ctx:
            raise ContextOverflowError(0, len(tokens), self.config.n_ctx, stage="prefix")
        before = self.tokens
        common = 0 if self._manifest.difference(manifest) else n_common(before, tuple(tokens))
        kept = self._rewind(common)
        if kept < common:
            kept = self._session.reuse(tokens)
        self._prefix, self._prefix_text, self._text, self._manifest = tokens[:kept], "", None, manifest
        self._evaluate(tokens[kept:], cancel)
        reused = min(common, kept)
        if self._session.cache.pool.layout.has_windows:
            self._checkpoint = self._session.checkpoint()
        self._prefix, self._prefix_text, self._text = tokens, text, text
        return PrefixStatus(
            reused, len(tokens) - reused, len(before) - reused, len(tokens), len(self.tokens), self._available,
            hash_bytes(text), hash_token_ids(tokens), manifest.digest,
        )  # fmt: skip

    def prefill_suffix(
        self, text: str, manifest: ContextManifest | None = None, *, cancel: Cancel | None = None
    ) -> SuffixStatus:
        """Append text to the context, after the prefix and earlier suffixes.

        The context has the tokens of the whole text if the suffix begins at a token boundary of it. Raises
        ManifestMismatchError if the manifest's identity or stable hashes differ from the prefix's, or the suffix begins
        within a token of the whole text; ContextOverflowError; both before anything changes; CancelledError with the
        context as before.
        """
        self._expect_open(cancel)
        manifest = manifest or ContextManifest()
        self._check_prefix(manifest)
        tokens = self._suffix_tokens(text, must_fit=not manifest.is_zero)
        if len(self.tokens) + len(tokens) > self.config.n_ctx:
            raise ContextOverflowError(len(self.tokens), len(tokens), self.config.n_ctx, stage="suffix")
        self._evaluate(tokens, cancel)
        self._text = None if self._text is None else self._text + text
        digest = (self._manifest if manifest.is_zero else manifest).digest
        return SuffixStatus(len(tokens), len(self._prefix), len(self.tokens), self._available, digest)

    def decode(
        self,
        config: DecodeConfig | None = None,
        *,
        cancel: Cancel | None = None,
        speculate: Drafter | None = None,
    ) -> Iterator[StreamChunk]:
        """Generate text as a stream of chunks.

        Generated tokens become part of the context. Generation ends at an end-of-generation token or a stop string,
        which are neither returned nor kept, or when the context is full. An error during generation is the last chunk:
        SessionClosedError after `close`, SessionFatalError if memory ends or the engine fails. `speculate` is as for
        `Session.generate`. Raises ContextOverflowError at once if the context is empty or full.
        """
        self._expect_open(cancel)
        n = len(self.tokens)
        if not n or n >= self.config.n_ctx:
            raise ContextOverflowError(n, 1, self.config.n_ctx, stage="decode")
        config = config or DecodeConfig()
        return self._decode(config, config.params(), cancel, speculate)

    def explain_context(self) -> ContextReport:
        """Report what the context holds."""
        if self._report is not None:
            return self._report
        if self._fatal is not None:
            raise self._fatal
        return self._describe(closed=False)

    def close(self) -> None:
        """Release the memory; closing twice does nothing."""
        if self._report is None:
            self._report = self._describe(closed=True)
            self._session.close()
            self._checkpoint = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode(
        self, config: DecodeConfig, params: SamplingParams, cancel: Cancel | None, speculate: Drafter | None
    ) -> Iterator[StreamChunk]:
        session, n = self._session, self._session.n_past
        try:
            self._expect_open()
            if not session.has_logits:  # the whole prefix was reused, so nothing was evaluated
                self._evaluate_last_again()
            session.set_seed(int.from_bytes(os.urandom(4)) if config.seed is None else config.seed)
            for token in session.generate([], params, max_tokens=config.max_tokens, speculate=speculate):
                if cancel is not None and cancel.is_set():
                    raise CancelledError("cancelled while generating")
                yield StreamChunk(token.piece)
                self._expect_open()
        except MemoryError as error:
            self._fatal = SessionFatalError(error)
            yield StreamChunk(error=self._fatal)
        except ClosedError as error:  # another thread may have closed the session during an evaluation
            is_own = self._report is None or isinstance(error, SessionClosedError)
            yield StreamChunk(error=error if is_own else _closed())
        except LlamaCliError as error:
            yield StreamChunk(error=error)
        except Exception as error:
            self._fatal = SessionFatalError(error)
            yield StreamChunk(error=self._fatal)
        finally:
            if session.n_past != n:
                self._text = None

    def _evaluate_last_again(self) -> None:
        """Compute the last logits in a fork: interrupts leave the context whole."""
        with self._session.fork() as fork:
            fork.rewind(len(self.tokens) - 1)
            fork.eval(self.tokens[-1:])
            self._session.logits = fork.logits

    def _rewind(self, n: int) -> int:
        """Keep n tokens, none if their window was evicted; returns the number."""
        if n < len(self.tokens):
            self._session.rewind(n)
            if len(self._session.cache.tokens) < n:
                self._session.rewind(0)
        return len(self.tokens)

    def _evaluate(self, tokens: Sequence[int], cancel: Cancel | None) -> None:
        """Evaluate tokens in batches; cancelled or interrupted, the context is as before."""
        start = len(self.tokens)
        try:
            for at in range(0, len(tokens), self.config.n_batch):
                if cancel is not None and cancel.is_set():
                    raise CancelledError(f"cancelled after {at} of {len(tokens)} tokens")
                self._session.eval(tokens[at : at + self.config.n_batch])
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
            raise ManifestMismatchError("the prefix does not match the manifest's stable_byte_hash")
        if manifest.stable_token_hash and manifest.stable_token_hash != hash_token_ids(tokens):
            raise ManifestMismatchError("the prefix's tokens do not match the manifest's stable_token_hash")

    def _check_prefix(self, manifest: ContextManifest) -> None:
        if manifest.is_zero or self._manifest.is_zero:
            return
        difference = self._manifest.difference(manifest)
        if difference:
            raise ManifestMismatchError(f"{difference} differs from the prefix's")
        for name in ("stable_byte_hash", "stable_token_hash"):
            if getattr(manifest, name) != getattr(self._manifest, name):
                raise ManifestMismatchError(f"{name} differs from the prefix's")

    @property
    def _available(self) -> int:
        return self.config.n_ctx - self._session.n_past

    def _describe(self, *, closed: bool) -> ContextReport:
        return ContextReport(
            self._session.n_past, len(self._prefix), self.config.n_ctx, self._available,
            hash_bytes(self._prefix_text), hash_token_ids(self._prefix), self._manifest.digest, self._manifest, closed,
        )  # fmt: skip

    def _expect_open(self, cancel: Cancel | None = None) -> None:
        if self._report is not None:
            raise _closed()
        if self._fatal is not None:
            raise self._fatal
        if cancel is not None and not isinstance(cancel, Cancel):
            raise InvalidRequestError(f"cancel must have an is_set method, like threading.Event: {cancel!r}")


def _closed() -> SessionClosedError:
    return SessionClosedError("the prefix session is closed")


def _format_name(model: Model, name: str) -> str:
    """Name of a prompt format as its plugin spells it.

    Hyphens and case do not count: "Chat-ML" is "chatml". Raises UnsupportedFeatureError if there is none.
    """

    def key(text: str) -> str:
        return text.replace("-", "").lower()

    found = next((fmt.name for fmt in model.chat_formats() if key(fmt.name) == key(name)), None)
    if name and found is None:
        raise UnsupportedFeatureError(f"prompt format {name!r}")
    return found or ""


def checked_threads(config: PrefixConfig) -> int | None:
    """Number of threads of a model; None is one a core."""
    return int(config.threads) if config.threads > 0 else None
