"""Memory limit of a model's KV cache, and eviction of prefixes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llamacli.engine.compiled_model import CompiledModel
from llamacli.errors import InvalidRequestError, OutOfMemoryError
from llamacli.kv import KVPool, KVSequence
from llamacli.kv.prompt_cache import PromptCache
from llamacli.serve.settings import EngineSettings
from llamacli.util.system import available_memory

_SHARE = 0.4
"""Share of the available memory that a model's cache takes by default."""

_LEAST_ROW_S = 0.002
"""Seconds of a token of a prompt before any was measured."""


class CacheMemory:
    """KV cache, prefix cache and drafters of a model under one limit.

    Kept prefixes use what running sequences leave, and are evicted when they need it. Drafters have the share of the
    memory that their caches have of a context's bytes.

    - `n_ctx`: tokens of every sequence; a single one always fits.
    - `max_bytes`: limit of the model's own caches.
    - `reads`: reads of prefixes by prompt, with the time when they began.
    """

    def __init__(self, model: CompiledModel, settings: EngineSettings, draft_pool: KVPool | None = None):
        """Set the limits of the model's pool and the drafters'.

        Raises InvalidRequestError if a context does not fit into the memory once, with both numbers.
        """
        program, n_ctx = model.program, settings.n_ctx
        # An encoder's keys and values are read in the step that writes them: rounding them saves nothing.
        self.pool = model.kv_pool(settings.kv_type or ("f32" if program.needs_whole_input else None))
        self._layouts = [pool.layout for pool in (self.pool, draft_pool) if pool is not None]
        if n_ctx is None:
            n_ctx = min(model.config.n_ctx, program.max_positions or model.config.n_ctx)
        wanted = model.context_size(n_ctx)
        limit = settings.kv_memory
        if limit is None:
            free = available_memory()
            limit = self._context_bytes(wanted) if free is None else int(_SHARE * free)
            if settings.kv_default is not None:
                least = 0 if settings.n_ctx is None else self._context_bytes(wanted)
                limit = min(limit, max(settings.kv_default, least))
        self.n_ctx = wanted if settings.n_ctx is not None else self._largest(wanted, limit)
        one = self._context_bytes(self.n_ctx)
        if one > limit:
            raise InvalidRequestError(
                f"a context of {self.n_ctx} tokens takes {one} bytes of KV cache, and {limit} are allowed: "
                "give fewer tokens or more memory"
            )
        n_sequences = settings.max_running + settings.extra_running
        most = limit if settings.kv_memory is not None else min(limit, n_sequences * one)
        n_drafts = most * (one - self.n_bytes(self.n_ctx)) // max(1, one)
        self.max_bytes = most - n_drafts
        if draft_pool is not None:
            draft_pool.max_bytes = n_drafts
        self.pool.max_bytes = model.prefix_cache_bytes = self.max_bytes
        self.prefixes = model.prefixes(self.pool.layout.kv_type, self.n_ctx)
        self._rope_variant = program.rope_variant(self.n_ctx)
        self._prompts: PromptCache | None = None
        self._reader: ThreadPoolExecutor | None = None
        self.reads: dict[tuple[int, ...], tuple[Future[int], float]] = {}
        if settings.prompt_cache is not None:
            folder, max_bytes = settings.prompt_cache
            self._prompts = PromptCache(Path(folder), max_bytes)
            self._prompts.save_in_background(self.prefixes)
            self._reader = ThreadPoolExecutor(1, "llamacli-prompts")

    def close(self) -> None:
        """Free the kept prefixes, once they are on disk."""
        if self._prompts is not None and self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
            self._prompts.close()
            self._prompts.save(self.prefixes)
        self.prefixes.clear()

    def read_ahead(self, tokens: Sequence[int], adapters: str) -> None:
        """Read a prompt's prefix from disk, in a thread.

        Its next chunk finds the prefix once it is there.
        """
        if self._prompts is not None and self._reader is not None:
            like = KVSequence(self.pool, self.n_ctx, self._rope_variant, adapters)
            reading = self._reader.submit(self._prompts.load, self.prefixes, like, tokens, self.max_bytes)
            self.reads[tuple(tokens)] = reading, time.monotonic()

    def read_of(self, tokens: Sequence[int], row_s: float) -> Future[int] | None:
        """Read that a prompt waits for, None for none.

        It waits half of the time at most that evaluating it takes, at `row_s` seconds a token.
        """
        key, now = tuple(tokens), time.monotonic()
        for done in [one for one, (reading, _) in list(self.reads.items()) if reading.done()]:
            self.reads.pop(done)
        reading, begun = self.reads.get(key, (None, now))
        return reading if now - begun < len(key) * max(row_s / 2, _LEAST_ROW_S) else None

    @property
    def shares_anywhere(self) -> bool:
        """True if a sequence that goes on can share any prefix.

        Sliding windows and recurrent states exist for the last tokens only.
        """
        return not (self.pool.layout.has_windows or self.pool.layout.recurrent)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of every group together."""
        return sum(pages.page_bytes for pages in self.pool.groups)

    @property
    def free_bytes(self) -> int:
        """Bytes that are free, or can be made so by evicting prefixes."""
        return (self.pool.free_bytes or 0) + self.prefixes.evictable_bytes

    def n_bytes(self, n_tokens: int) -> int:
        """Bytes of a sequence of that many tokens; 0 for none."""
        return self.pool.layout.n_bytes(min(n_tokens, self.n_ctx)) if n_tokens > 0 else 0

    def new_sequence(self, adapters: str = "") -> KVSequence:
        """Empty sequence, which the prefix cache finds from now on.

        `adapters` is the key of the LoRA adapters that it is computed with.
        """
        sequence = KVSequence(self.pool, self.n_ctx, self._rope_variant, adapters)
        self.prefixes.add(sequence)
        return sequence

    def fork(self, sequence: KVSequence) -> KVSequence:
        """Copy of a sequence that shares its pages."""
        child = sequence.fork()
        self.prefixes.add(child)
        return child

    def reuse(self, sequence: KVSequence, tokens: Sequence[int]) -> int:
        """Extend a sequence by cached tokens of `tokens`, a list; their number."""
        try:
            return self.prefixes.reuse(sequence, tokens)
        except OutOfMemoryError:  # for the rest of a page that it has begun; without it the tokens are evaluated
            return 0

    def evict(self, n_bytes: int) -> bool:
        """Evict prefixes until so many bytes are free; False if impossible."""
        while (self.pool.free_bytes or 0) < n_bytes:
            if not self.prefixes.evict_one():
                return False
        return True

    def spare(self, n_bytes: int) -> bool:
        """Evict prefixes until so many bytes are free.

        False if that is impossible, and then none is evicted.
        """
        return (self.pool.free_bytes or 0) >= n_bytes or (self.free_bytes >= n_bytes and self.evict(n_bytes))

    def keep(self, sequence: KVSequence) -> None:
        """Keep a sequence's tokens for later prompts."""
        self.prefixes.keep(sequence, self.max_bytes)

    def forget(self, tokens: Sequence[int], adapters: str) -> None:
        """Evict what is kept of a text's beginnings, and not in use."""
        self.prefixes.forget(KVSequence(self.pool, self.n_ctx, self._rope_variant, adapters), [*tokens])

    def forget_all(self) -> None:
        """Forget all prefixes and page changes.

        Other pipeline stages begin without pages, and no sequence may have one.
        """
        self.prefixes.clear()
        self.pool.collect()
        if self.pool.log is not None:
            self.pool.log.clear()

    def _context_bytes(self, n_tokens: int) -> int:
        return sum(layout.n_bytes(n_tokens) for layout in self._layouts)

    def _largest(self, n_ctx: int, limit: int) -> int:
        """Largest context within a limit of bytes.

        From one to `n_ctx` tokens.
        """
        low, high = 1, n_ctx
        while low < high:
            middle = (low + high + 1) // 2
            if self._context_bytes(middle) <= limit:
                low = middle
            else:
                high = middle - 1
        return low
