"""Random operations on prefix sessions, compared with fresh sessions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import byte_tokens
from byte_tokens import EOS, TOKENS
from llamacli import ContextOverflowError, Model, Session, load_model
from llamacli.engine import default_engine
from llamacli.generation import stream
from llamacli.prefix import (
    CancelledError,
    ContextManifest,
    DecodeConfig,
    ManifestMismatchError,
    PrefixConfig,
    PrefixSession,
)
from prefix_helpers import CancelAfter
from suite import examples

N_CTX = 80
TEXTS = st.sampled_from(["a", "aé", "é", " €b", "<think>", "a\u00c3", "abc" * 9, "abc" * 7 + "é" * 5, ""])
MANIFESTS = st.sampled_from([None, None, ContextManifest(profile_id="a"), ContextManifest(profile_id="b")])
STOPS = st.sampled_from([None, None, None, 0, 1, 2])
"""Batch before which a call is cancelled or interrupted."""


class PrefixMachine(RuleBasedStateMachine):
    """`tokens`: the expected context; `text`: its text, or None.

    It is None after generated tokens, and after a prefix that was cancelled.
    """

    model: Model

    def __init__(self) -> None:
        super().__init__()
        self.session = PrefixSession(self.model, PrefixConfig(n_ctx=N_CTX, n_batch=4))
        self.tokens: list[int] = []
        self.text: str | None = ""
        self.manifest = ContextManifest()

    def encoded(self, text: str) -> list[int]:
        return self.model.tokenizer.encode_prompt(text, parse_special=True)

    @rule(text=TEXTS, more=TEXTS, manifest=MANIFESTS, n=STOPS)
    def ensure_prefix(self, text: str, more: str, manifest: ContextManifest | None, n: int | None) -> None:
        tokens = self.encoded(text + more)
        try:
            status = self.session.ensure_prefix(text + more, manifest, cancel=None if n is None else CancelAfter(n))
        except ContextOverflowError:
            assert len(tokens) > N_CTX
            return
        except CancelledError:
            left = list(self.session.tokens)
            assert left == tokens[: len(left)]
            self.tokens, self.text = left, None
        else:
            assert (status.reused + status.prefilled, status.resident) == (len(tokens), len(tokens))
            self.tokens, self.text = tokens, text + more
        self.manifest = manifest or ContextManifest()

    @rule(text=TEXTS, manifest=MANIFESTS, n=STOPS)
    def prefill_suffix(self, text: str, manifest: ContextManifest | None, n: int | None) -> None:
        whole = None if self.text is None else self.encoded(self.text + text)
        is_whole = whole is not None and whole[: len(self.tokens)] == self.tokens
        tokens = whole if is_whole and whole is not None else [*self.tokens, *self.encoded(text)]
        try:
            self.session.prefill_suffix(text, manifest, cancel=None if n is None else CancelAfter(n))
        except ContextOverflowError:
            assert len(tokens) > N_CTX
        except ManifestMismatchError:
            assert manifest is not None
            assert manifest != self.manifest or not is_whole
        except CancelledError:
            assert n is not None
        else:
            self.tokens, self.text = tokens, None if self.text is None else self.text + text

    @precondition(lambda self: 0 < len(self.tokens) < N_CTX)
    @rule(
        draws=st.lists(TOKENS, max_size=6),
        limit=st.integers(1, 7),
        n_taken=st.sampled_from([99, 99, 0, 1, 2, 3]),
        n=STOPS,
    )
    def decode(self, draws: list[int], limit: int, n_taken: int, n: int | None) -> None:
        ends = self.model.tokenizer.eog_ids
        ids = list(itertools.takewhile(lambda token: token not in ends, draws))[: min(limit, N_CTX - len(self.tokens))]
        with mock.patch.object(Session, "draw", side_effect=itertools.chain(draws, itertools.repeat(EOS))):
            chunks = self.session.decode(DecodeConfig(max_tokens=limit), cancel=None if n is None else CancelAfter(n))
            found = list(itertools.islice(chunks, n_taken))
            chunks.close()
        is_cancelled = n is not None and n < min(len(ids), n_taken)
        assert [type(chunk.error) for chunk in found if chunk.error] == [CancelledError] * is_cancelled
        n_found = len(found) - is_cancelled
        assert n_found == min(len(ids), n_taken, 99 if n is None else n)
        in_hand = bool(n_found) and n_found == n_taken
        kept = ids[: n_found - in_hand]
        self.tokens += kept
        self.text = None if kept else self.text

    @precondition(lambda self: 0 < len(self.tokens) < N_CTX)
    @rule()
    def interrupt(self) -> None:
        """Interrupt the next evaluation."""
        with mock.patch.object(stream, "evaluate", side_effect=KeyboardInterrupt):
            with contextlib.suppress(KeyboardInterrupt, ContextOverflowError):
                self.session.prefill_suffix("abc")
            with contextlib.suppress(KeyboardInterrupt):
                list(self.session.decode(DecodeConfig(max_tokens=1)))

    @invariant()
    def context_is_as_expected(self) -> None:
        assert self.session.tokens == tuple(self.tokens)
        if self.session._session.has_logits:
            with self.model.create_session(n_ctx=N_CTX, reuse=False) as other:
                other.eval(self.tokens)
                np.testing.assert_array_equal(self.session._session.logits, other.logits)

    def teardown(self) -> None:
        self.session.close()


@pytest.fixture(scope="module", params=["gqa", "gemma3", "qwen35"])
def machine(request: pytest.FixtureRequest, tiny_gguf, plugins) -> Iterator[type[PrefixMachine]]:
    """Machine of a model with full attention, sliding windows, recurrent states."""
    path = tiny_gguf(request.param, tokenizer=f"gpt2:{byte_tokens.N_VOCAB}", metadata=byte_tokens.byte_keys())
    with load_model(path, "fp32", plugins=plugins, engine=default_engine()) as model:
        PrefixMachine.model = model
        yield PrefixMachine


def test_contexts_are_as_fresh_ones(machine: type[PrefixMachine]) -> None:
    run_state_machine_as_test(machine, settings=examples(60, stateful_step_count=20))
