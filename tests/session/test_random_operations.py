"""Random operations on sessions, compared with lists of tokens and fresh sessions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import attrs
import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import byte_tokens
from adapters import write_adapter
from byte_tokens import EOS, TOKENS
from llamacli import ContextOverflowError, InvalidRequestError, Model, SamplingParams, Session, StateError, load_model
from llamacli.engine import default_engine
from llamacli.engine.adapters import Adapter
from llamacli.generation import stream
from llamacli.generation.stream import eval_batch
from suite import examples

N_CTX, MAX_SESSIONS = 90, 4
LONG = [byte_tokens.WHOLE[i % 3] for i in range(70)]
RANDOM = SamplingParams(temperature=1.0, repeat_penalty=1.3, repeat_last_n=8)

INTERRUPT = -1
"""Stands for a token whose draw is interrupted."""

indices = st.integers(0, MAX_SESSIONS - 1)
places = st.integers(0, N_CTX)
runs = st.lists(TOKENS, min_size=1, max_size=6) | st.integers(1, len(LONG)).map(lambda n: LONG[:n])
stops = st.sampled_from([(), (), ("é",), ("a€", "b"), ("abc",)])
strategies = st.sampled_from(["always", "always", "disabled"])
faults = st.sampled_from([None, None, None, "before", "after"])


@attrs.define(eq=False)
class Plain:
    """Expected tokens and logits of a session, and the tokens accepted.

    With `is_cut`, some of its cells may have seen tokens that were removed.
    """

    scale: float
    tokens: list[int] = attrs.field(factory=list)
    logits: np.ndarray | None = None
    accepted: list[int] = attrs.field(factory=list)
    is_cut: bool = False


@attrs.define
class Scripted:
    """Drafter of tokens that come, and of others from some place on."""

    text: Sequence[int]
    n_right: int

    def begin(self, model: object) -> None:
        pass

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        known = [abs(token) for token in self.text[len(tokens) :]]
        return [*known[: self.n_right], *byte_tokens.WHOLE][:limit]

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        assert 0 <= n_accepted <= n_drafted > 0


@contextlib.contextmanager
def fault(when: str | None) -> Iterator[None]:
    """Interrupt evaluations before or after they change the cache."""

    def interrupted(*args: object, **options: object) -> None:
        if when == "after":
            evaluate(*args, **options)
        raise KeyboardInterrupt

    evaluate = stream.evaluate
    if when is None:
        yield
        return
    with mock.patch.object(stream, "evaluate", interrupted), pytest.raises(KeyboardInterrupt):
        yield


class SessionMachine(RuleBasedStateMachine):
    """`sessions`: open sessions, each with what is expected of it."""

    model: Model
    adapter: Adapter
    known: dict[tuple[float, tuple[int, ...]], np.ndarray]

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[tuple[Session, Plain]] = []
        self.pinned: list[object] = []

    def pick(self, index: int) -> tuple[Session, Plain]:
        if not self.sessions:
            self.create(0.0, True, "always")
        return self.sessions[index % len(self.sessions)]

    def add(self, session: Session, plain: Plain) -> None:
        if len(self.sessions) == MAX_SESSIONS:
            self.sessions.pop(0)[0].close()
        self.sessions.append((session, plain))

    def fresh(self, plain: Plain, tokens: Sequence[int]) -> np.ndarray:
        """Logits of a session that evaluates these tokens alone."""
        key = plain.scale, tuple(tokens)
        if key not in self.known:
            with self.model.create_session(n_ctx=N_CTX, reuse=False, adapters=self.adapters(plain.scale)) as session:
                session.eval(tokens)
                self.known[key] = session.logits.copy()
        return self.known[key]

    def adapters(self, scale: float) -> list[tuple[Adapter, float]]:
        return [(self.adapter, scale)] if scale else []

    def extend(self, session: Session, plain: Plain, tokens: Sequence[int], *, drops: bool = False) -> None:
        """Expect tokens that were evaluated, and their logits.

        There are none if tokens after them were dropped. After removed tokens they are not those of a fresh session.
        """
        plain.tokens += tokens
        if drops and not session.has_logits:
            plain.logits = None
        elif tokens:
            is_stale = plain.is_cut and session.cache.first_stale_cell is not None
            plain.logits = session.logits.copy() if is_stale else self.fresh(plain, plain.tokens)

    @rule(scale=st.sampled_from([0.0, 0.0, 1.0]), reuse=st.booleans(), strategy=strategies)
    def create(self, scale: float, reuse: bool, strategy: str) -> None:
        options = {"n_ctx": N_CTX, "reuse": reuse, "strategy": strategy, "adapters": self.adapters(scale)}
        self.add(self.model.create_session(**options), Plain(scale))

    @rule(index=indices)
    def hold(self, index: int) -> None:
        self.pick(index)[0].cache.hold()

    @rule(index=indices, tokens=runs, when=faults, all_logits=st.booleans())
    def evaluate(self, index: int, tokens: list[int], when: str | None, all_logits: bool) -> None:
        session, plain = self.pick(index)
        if len(plain.tokens) + len(tokens) > N_CTX:
            with pytest.raises(ContextOverflowError):
                session.eval(tokens)
            return
        with fault(when):
            session.eval(tokens, all_logits=all_logits)
        self.extend(session, plain, [] if when else tokens)

    @rule(index=indices, scale=st.sampled_from([0.0, 1.0]), token=TOKENS)
    def evaluate_as_another(self, index: int, scale: float, token: int) -> None:
        """Share what can be shared of the cells of another session."""
        tokens = [*self.pick(index)[1].tokens[: N_CTX - 1], token]
        self.create(scale, True, "always")
        session, plain = self.sessions[-1]
        session.eval(tokens)
        self.extend(session, plain, tokens)

    @rule(tokens=st.lists(runs, min_size=2, max_size=MAX_SESSIONS), when=faults)
    def evaluate_batch(self, tokens: list[list[int]], when: str | None) -> None:
        work = [
            (pair, ids)
            for pair, ids in zip(self.sessions, tokens, strict=False)
            if len(pair[1].tokens) + len(ids) <= N_CTX
        ]
        assume(work)
        with fault(when):
            eval_batch((session, ids) for (session, _), ids in work)
        for (session, plain), ids in work:
            self.extend(session, plain, [] if when else ids)

    @rule(index=indices, token=TOKENS, draft=st.lists(TOKENS, max_size=4), n_right=st.integers(0, 4), more=TOKENS)
    def evaluate_ahead(self, index: int, token: int, draft: list[int], n_right: int, more: int) -> None:
        session, plain = self.pick(index)
        assume(len(plain.tokens) + len(draft) + 2 <= N_CTX)
        session.eval_ahead(token, draft)
        self.extend(session, plain, [token])
        for expected in (*draft[:n_right], more):
            session.eval([expected])
            self.extend(session, plain, [expected])

    @rule(index=indices, n=places)
    def rewind(self, index: int, n: int) -> None:
        session, plain = self.pick(index)
        n %= len(plain.tokens) + 1
        session.rewind(n)
        del plain.tokens[n:]
        plain.logits = None

    @rule(index=indices, p0=places, n=st.integers(0, 20))
    def remove_range(self, index: int, p0: int, n: int) -> None:
        session, plain = self.pick(index)
        p0 %= len(plain.tokens) + 1
        p1 = min(p0 + n, len(plain.tokens))
        n_after = len(plain.tokens) - p1
        try:
            session.remove_range(p0, p1)
        except InvalidRequestError:
            assert session.cache.pool.layout.has_windows
            return
        del plain.tokens[p0:p1]
        if n_after:
            plain.is_cut = True
        else:
            plain.logits = None

    @rule(index=indices)
    def fork(self, index: int) -> None:
        session, plain = self.pick(index)
        self.add(session.fork(), attrs.evolve(plain, tokens=list(plain.tokens), accepted=list(plain.accepted)))

    @rule(index=indices, other=indices)
    def save_and_load(self, index: int, other: int) -> None:
        (session, plain), (target, changed) = self.pick(index), self.pick(other)
        state = session.save_state(note=index)
        if plain.scale != changed.scale:
            with pytest.raises(StateError, match="LoRA"):
                target.load_state(state)
            return
        assert target.load_state(state) == {"note": index}
        changed.tokens, changed.accepted, changed.logits = list(plain.tokens), list(plain.accepted), plain.logits
        changed.is_cut = plain.is_cut

    @rule(index=indices, tokens=runs)
    def reuse(self, index: int, tokens: list[int]) -> None:
        session, plain = self.pick(index)
        assume(len(plain.tokens) + len(tokens) <= N_CTX)
        n = session.reuse(tokens)
        assert 0 <= n < len(tokens)
        plain.tokens += tokens[:n]
        plain.logits = None if n else plain.logits

    @rule(index=indices)
    def checkpoint(self, index: int) -> None:
        self.pinned.append(self.pick(index)[0].checkpoint())

    @rule(index=indices, tail=runs)
    def clear_and_reseed(self, index: int, tail: list[int]) -> None:
        session, plain = self.pick(index)
        plain.tokens = plain.tokens[:2]
        session.clear_and_reseed(plain.tokens, tail)
        self.extend(session, plain, tail)

    @rule(index=indices)
    def close(self, index: int) -> None:
        if self.sessions:
            self.sessions.pop(index % len(self.sessions))[0].close()

    @rule(index=indices, token=TOKENS)
    def accept(self, index: int, token: int) -> None:
        session, plain = self.pick(index)
        session.accept(token)
        plain.accepted.append(token)

    @rule(index=indices, seed=st.integers(0, 3))
    def draw(self, index: int, seed: int) -> None:
        """The seed, the logits and the tokens accepted decide alone."""
        session, plain = self.pick(index)
        assume(plain.logits is not None)
        with self.model.create_session(seed=seed, n_ctx=N_CTX) as other:
            other.logits = plain.logits
            for token in plain.accepted:
                other.accept(token)
            expected = [other.draw(RANDOM) for _ in range(3)]
        session.set_seed(seed)
        assert [session.draw(RANDOM) for _ in range(3)] == expected

    @rule(
        index=indices,
        prompt=st.lists(TOKENS, max_size=3),
        draws=st.lists(TOKENS | st.sampled_from([EOS, INTERRUPT]), max_size=9),
        limit=st.integers(0, 9),
        n_taken=st.sampled_from([99, 99, 0, 1, 2, 3, 4]),
        stop=stops,
        n_right=st.none() | st.integers(0, 4),
    )
    def generate(
        self,
        index: int,
        prompt: list[int],
        draws: list[int],
        limit: int,
        n_taken: int,
        stop: tuple[str, ...],
        n_right: int | None,
    ) -> None:
        session, plain = self.pick(index)
        assume(len(plain.tokens) + len(prompt) <= N_CTX and (prompt or plain.logits is not None))
        text = Text.of(self.model, [*plain.tokens, *prompt], draws, limit, stop)
        drafter = None if n_right is None else Scripted([*plain.tokens, *prompt, *draws], n_right)
        script = itertools.chain(draws, itertools.repeat(EOS))

        def draw(_: object) -> int:
            token = next(script)
            if token == INTERRUPT:
                raise KeyboardInterrupt
            return token

        found: list[tuple[int, str]] = []
        is_left = False
        with mock.patch.object(session, "draw", draw):
            tokens = session.generate(prompt, SamplingParams(stop=stop), max_tokens=limit, speculate=drafter)
            try:
                for token in itertools.islice(tokens, n_taken):
                    found.append((token.id, token.piece))
                is_left = len(found) == n_taken
            except KeyboardInterrupt:
                assert text.is_interrupted
            tokens.close()
        assert found[:-1] == text.tokens[: len(found)][:-1]
        if is_left:
            n_kept = min(text.whole, n_taken - 1)
        elif text.is_interrupted:
            n_kept = len(found)
            assert stop or n_kept == text.whole
        else:
            n_kept = text.whole
            assert ("".join(piece for _, piece in found), session.stop_string) == (text.text, text.stop)
        assert text.text.startswith("".join(piece for _, piece in found))
        if n_taken:
            self.extend(session, plain, [*prompt, *draws[:n_kept]], drops=bool(stop))
            plain.accepted = list(session._sampler.history)
            assert plain.accepted[:n_kept] == draws[:n_kept]
            assert stop or len(plain.accepted) == n_kept

    @invariant()
    def sessions_are_as_expected(self) -> None:
        for session, plain in self.sessions:
            assert session.tokens == tuple(plain.tokens)
            assert session.has_logits == (plain.logits is not None)
            assert session._sampler.history == plain.accepted
            if plain.logits is not None:
                np.testing.assert_array_equal(session.logits, plain.logits)

    def teardown(self) -> None:
        self.pinned.clear()
        for session, plain in self.sessions:
            if len(plain.tokens) < N_CTX:
                session.eval([EOS])
                self.extend(session, plain, [EOS])
        self.sessions_are_as_expected()
        while self.sessions:
            self.sessions.pop()[0].close()
        for index in self.model._prefixes.values():
            index.clear()
        assert self.model.kv_pool().n_used_bytes == 0


@attrs.frozen
class Text:
    """Expected text of a generation, and what of it stays.

    - `tokens`: those drawn, with their pieces; `whole`: how many of them are whole before the stop string.
    - `text`: up to the stop string.
    """

    tokens: list[tuple[int, str]]
    whole: int
    text: str
    stop: str = ""
    is_interrupted: bool = False

    @classmethod
    def of(cls, model: Model, before: list[int], draws: list[int], limit: int, stops: Sequence[str]) -> Text:
        limit = min(limit, N_CTX - len(before))
        decoder = model.tokenizer.stream()
        for token in before:
            decoder.feed(token)
        tokens: list[tuple[int, str]] = []
        text, ends = "", [0]  # of the text after each token that ends no character half-way
        for token in [*draws, EOS][: limit or None]:
            if token in model.tokenizer.eog_ids or token == INTERRUPT or not limit:
                break
            piece = decoder.feed(token) + (decoder.flush() if len(tokens) == limit - 1 else "")
            tokens, text = [*tokens, (token, piece)], text + piece
            found = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
            if found:
                _, start, stop = min(found)
                whole = max(n for n, end in enumerate(ends) if end <= start)
                return cls(tokens, whole, text[:start], stop)
            ends.append(N_CTX if decoder.holds_bytes else len(text))
        is_interrupted = len(tokens) < limit and [*draws, EOS][len(tokens)] == INTERRUPT
        return cls(tokens, len(tokens), text, "", is_interrupted)


@pytest.fixture(scope="module", params=["gqa", "gemma3", "qwen35"])
def machine(request: pytest.FixtureRequest, tiny_gguf, plugins, tmp_path_factory) -> Iterator[type[SessionMachine]]:
    """Machine of a model with full attention, sliding windows, recurrent states."""
    path = tiny_gguf(request.param, tokenizer=f"gpt2:{byte_tokens.N_VOCAB}", metadata=byte_tokens.byte_keys())
    with load_model(path, "fp32", plugins=plugins, engine=default_engine()) as model:
        file = write_adapter(Path(tmp_path_factory.mktemp("adapters")) / "a.gguf", path, chosen=lambda n: "ffn" in n)
        SessionMachine.model, SessionMachine.adapter, SessionMachine.known = model, model.load_adapter(file), {}
        yield SessionMachine


def test_sessions_are_as_fresh_ones(machine: type[SessionMachine]) -> None:
    run_state_machine_as_test(machine, settings=examples(60, stateful_step_count=30))
