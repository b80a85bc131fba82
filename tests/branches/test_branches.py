import math
import sys
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from candidates import exact_softmax, log_softmax
from conftest import LoadTiny
from llamacli import CacheFull, ClosedError, InvalidRequestError, Model, SamplingParams, load_model
from llamacli.branches import Branches
from llamacli.engine import default_engine
from llamacli.sampling import Candidates, Draw, Grammar, SamplerChain, merge_logits
from suite import examples

LONG = np.random.RandomState(7).randint(0, 128, 100).tolist()
RANDOM = SamplingParams(temperature=1.0, top_k=40, repeat_penalty=1.2)


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa")


@pytest.fixture
def branches(model: Model) -> Branches:
    return Branches(model, n_leases=6, n_ctx_seq=64)


def logits_after(model: Model, tokens: tuple[int, ...]) -> np.ndarray:
    with model.create_session(reuse=False) as session:
        session.eval(tokens)
        return session.logits


def test_fork_draws_and_evaluates_as_its_parent_would(model: Model, branches: Branches) -> None:
    root = branches.create(LONG[:20])
    for _ in range(3):
        branches.accept(root, token := branches.sample(root, RANDOM))
        branches.step(root, token)
    children = [branches.fork(root) for _ in range(3)]
    drawn = [[branches.sample(branch, RANDOM) for _ in range(5)] for branch in [root, *children]]
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
    branches.decode({children[0]: [1, 2, 3], children[2]: [4]})
    assert branches.tokens(children[1]) == branches.tokens(root)
    texts = set()
    for seed in (1, 2, 1):
        branches.set_seed(children[1], seed)
        texts.add(tuple(branches.sample(children[1]) for _ in range(9)))
    assert len(texts) == 2
    for handle in (root, *children):
        np.testing.assert_array_equal(branches.logits(handle), logits_after(model, branches.tokens(handle)))


def test_fork_without_logits_and_set_logits(model: Model, branches: Branches) -> None:
    root = branches.create(LONG[:5])
    child = branches.fork(root, clone_logits=False)
    with pytest.raises(InvalidRequestError, match="no logits"):
        branches.sample(child)
    wanted = np.zeros(128, np.float32)
    wanted[77] = 1
    branches.set_logits(root, wanted)
    assert branches.sample(root) == 77
    with pytest.raises(InvalidRequestError, match="shape"):
        branches.set_logits(root, wanted[:5])
    branches.set_logits(child, branches.logits(root))
    wanted[77] = 0
    assert branches.sample(child) == 77, "set_logits copies"


def test_prefill_returns_all_logits(model: Model, branches: Branches) -> None:
    root = branches.create(LONG[:5])
    logits = branches.prefill(root, LONG[5:9], all_logits=True)
    assert logits is not None
    for i, row in enumerate(logits):
        np.testing.assert_array_equal(row, logits_after(model, LONG[: 6 + i]))
    assert branches.prefill(root, LONG[9:10]) is None


def test_batched_decode_is_bit_equal(model: Model, branches: Branches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamacli.engine.batching.N_BATCH", 8)
    root = branches.create(LONG[:7])
    forks = [branches.fork(root) for _ in range(4)]
    for work in ([1, 1, 1, 1], [3, 20, 0, 6], [8, 1, 7, 2]):  # one token each; more than a batch, or none; full batches
        tokens = {fork: LONG[len(branches.tokens(fork)) :][:n] for fork, n in zip(forks, work, strict=True)}
        branches.decode(tokens)
        for fork in forks:
            np.testing.assert_array_equal(branches.logits(fork), logits_after(model, branches.tokens(fork)))


def test_sampling_params_persist_and_are_inherited(model: Model, branches: Branches) -> None:
    with pytest.raises(InvalidRequestError, match="top_k"):
        branches.create(LONG[:5], SamplingParams(samplers=("top_k", "no such")))
    biased = SamplingParams(logit_bias={9: math.inf})
    root, greedy = branches.create(LONG[:5], biased), branches.create(LONG[:5])
    child = branches.fork(root)
    assert branches.sample(root) == branches.sample(child) == 9
    assert branches.sample(greedy) == branches.logits(greedy).argmax() != 9
    assert branches.sample(greedy, biased) == branches.sample(greedy) == 9


def test_branches_of_one_sampler_chain_have_their_own_grammar_state(load_tiny: LoadTiny) -> None:
    pytest.importorskip("llguidance")
    model = load_tiny("gqa", tokenizer="spm")
    branches = Branches(model, n_leases=3, n_ctx_seq=64)
    chain = SamplerChain([Grammar.from_gbnf('root ::= "ab"', model.tokenizer), Draw()])
    roots = [branches.create(LONG[:5], chain) for _ in range(2)]
    for handle in roots:
        branches.accept(handle, branches.sample(handle))
    child = branches.fork(roots[0])
    assert branches.legal_priors(child)[0].tolist() == branches.legal_priors(roots[1])[0].tolist()


def test_legal_priors_are_the_softmax_of_tokens_that_the_grammar_allows(load_tiny: LoadTiny) -> None:
    pytest.importorskip("llguidance")
    model = load_tiny("gqa", tokenizer="spm")
    branches = Branches(model, n_leases=3, n_ctx_seq=64)
    root = branches.create(LONG[:5], SamplingParams(temperature=1.5, grammar='root ::= "a" [bcd]'))
    free = branches.create(LONG[:5])
    a, b, c, d, x = (model.tokenizer.encode_run(text, continues=True)[0] for text in "abcdx")
    assert branches.legal_priors(root)[0].tolist() == [a]
    with pytest.raises(InvalidRequestError, match="grammar: "):
        branches.accept(root, x)
    branches.accept(root, a)
    logits = branches.logits(root).copy()
    ids, p = branches.legal_priors(root)
    assert {model.tokenizer.piece_bytes(token) for token in ids.tolist()} == {b"b", b"c", b"d"}
    np.testing.assert_allclose(p, exact_softmax(logits[ids]), rtol=1e-9)
    assert [branches.is_token_legal(root, token) for token in (a, b, c, d, x)] == [False, True, True, True, False]
    child = branches.fork(root)
    branches.accept(child, b)
    assert branches.legal_priors(child)[0].tolist() == sorted(model.tokenizer.eog_ids)
    assert branches.is_token_legal(root, d), "a fork has its own grammar state"
    assert not any(branches.is_token_legal(free, token) for token in (True, 1.5, -1, 10**9, None, "a"))
    np.testing.assert_array_equal(branches.logits(root), logits)
    ids, p = branches.legal_priors(free)
    np.testing.assert_allclose(p, exact_softmax(branches.logits(free)), rtol=1e-9)
    assert len(ids) == model.config.n_vocab


@pytest.mark.parametrize("params", [SamplingParams(grammar="root ::= [ab]"), SamplingParams(logit_bias={5: 1e9})])
def test_steer_is_called_between_grammar_and_chain(load_tiny: LoadTiny, params: SamplingParams) -> None:
    branches = Branches(load_tiny("gqa", tokenizer="spm"), n_leases=3, n_ctx_seq=64, measure=True)
    root = branches.create([3, 4], params)
    free = branches.sample(root)
    seen = []

    def steer(candidates: Candidates) -> None:
        seen.append(candidates.ids.tolist())
        candidates.keep_where(candidates.ids != free)

    branches.set_steer(root, steer)
    logits = branches.logits(root).copy()
    child = branches.fork(root)
    assert branches.sample(root) != free == branches.sample(child), "forks do not inherit it"
    legal = branches.legal_priors(root)[0].tolist()
    assert seen == [legal], "the grammar has been applied, and the steering is no part of it"
    np.testing.assert_array_equal(branches.logits(root), logits)
    branches.set_steer(root, None)
    assert branches.sample(root) == free
    with pytest.raises(InvalidRequestError, match="steer must be a function of candidates or None, not 5"):
        branches.set_steer(root, 5)


def test_steer_that_leaves_nothing_is_refused(branches: Branches) -> None:
    root = branches.create([1])
    for fault in (-np.inf, np.nan):
        branches.set_steer(root, lambda candidates, fault=fault: candidates.logits.fill(fault))
        with pytest.raises(InvalidRequestError, match="cannot sample: the largest logit is"):
            branches.sample(root)
    branches.set_steer(root, None)
    assert branches.sample(root) >= 0


def test_merge_logits_is_contrastive_decoding(branches: Branches) -> None:
    expert, amateur = branches.create(LONG[:20]), branches.create(LONG[16:20])
    logits = [branches.logits(handle).copy() for handle in (expert, amateur)]
    other = branches.fork(expert, clone_logits=False)
    for alpha in (0.0, 0.3):
        branches.set_logits(other, logits[0])
        branches.merge_logits(other, {amateur: -0.5, expert: 1.5}, alpha=alpha)
        expected = merge_logits(logits, [1.5, -0.5], alpha=alpha)
        np.testing.assert_allclose(branches.logits(other), expected, rtol=1e-5)
    branches.merge_logits(expert, {expert: 1, amateur: -1}, alpha=0.1)
    np.testing.assert_array_equal(branches.logits(expert), merge_logits(logits, [1, -1], alpha=0.1))
    np.testing.assert_array_equal(branches.logits(amateur), logits[1])
    bare = branches.fork(amateur, clone_logits=False)
    branches.merge_logits(bare, {amateur: 1.0})
    np.testing.assert_allclose(exact_softmax(branches.logits(bare)), exact_softmax(logits[1]), rtol=1e-4)


def test_failed_merge_logits_changes_nothing(branches: Branches) -> None:
    root, gone = branches.create(LONG[:5]), branches.create(LONG[:4])
    bare = branches.fork(root, clone_logits=False)
    branches.prune(gone)
    before = branches.logits(root).copy()
    for target, weights, alpha, reason in (
        (root, {root: 1, gone: -1}, 0, "does not exist"),
        (gone, {root: 1}, 0, "does not exist"),
        (root, {root: 1, bare: -1}, 0, "no logits"),
        (bare, {root: 1}, 0.1, "no logits"),
        (root, {root: math.nan}, 0, "weight nan"),
        (root, {}, 0, "all weights are 0"),
        (root, {root: 1}, 2, "alpha"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            branches.merge_logits(target, weights, alpha=alpha)
    np.testing.assert_array_equal(branches.logits(root), before)


def test_metrics_of_accepted_tokens(model: Model) -> None:
    branches = Branches(model, n_leases=3, n_ctx_seq=64, measure=True)
    root = branches.create(LONG[:10], SamplingParams(temperature=0.7, top_k=5))
    assert branches.metrics(root).model.perplexity == branches.metrics(root).sampling.perplexity == math.inf
    surprisals: list[float] = []
    drawn_surprisals: list[float] = []
    for i in range(6):
        raw = branches.logits(root).astype(np.float64)
        token = branches.sample(root)
        if i == 3:
            token = int(raw.argmin())  # not the drawn token
        branches.accept(root, token)
        surprisals.append(-math.log(exact_softmax(raw)[token]))
        kept = np.flatnonzero(raw >= np.sort(raw)[-5])
        p = exact_softmax(raw[kept] / 0.7)
        metrics = branches.metrics(root)
        assert metrics.model.surprisal == pytest.approx(surprisals[-1], rel=1e-5)
        assert metrics.model.entropy == pytest.approx(-(exact_softmax(raw) * np.log(exact_softmax(raw))).sum())
        if i == 3:
            assert metrics.sampling.surprisal == metrics.sampling.entropy == math.inf
        else:
            drawn_surprisals.append(-math.log(p[kept.tolist().index(token)]))
            assert metrics.sampling.surprisal == pytest.approx(drawn_surprisals[-1], rel=1e-5)
            assert metrics.sampling.entropy == pytest.approx(-(p * np.log(p)).sum(), rel=1e-5)
        assert metrics.model.perplexity == pytest.approx(math.exp(np.mean(surprisals)), rel=1e-5)
        assert metrics.sampling.perplexity == pytest.approx(math.exp(np.mean(drawn_surprisals)), rel=1e-5)
        branches.step(root, token)
    before = branches.metrics(root)
    child = branches.fork(root)
    assert branches.metrics(child) == before
    branches.accept(child, 3)
    assert branches.metrics(child).model.n_tokens == 7
    assert branches.metrics(root) == before
    bare = branches.fork(root, clone_logits=False)
    branches.accept(bare, 3)
    assert branches.metrics(bare).model == before.model, "nothing can be measured without logits"


@pytest.mark.parametrize("token", [-1, 128, 1.0, True])
def test_accept_refuses_invalid_token_ids(model: Model, token: int) -> None:
    branches = Branches(model, n_leases=1, n_ctx_seq=64, measure=True)
    root = branches.create(LONG[:5], SamplingParams(presence_penalty=1e6))
    with pytest.raises(InvalidRequestError, match="is not an id from 0 to 127"):
        branches.accept(root, token)
    assert branches.metrics(root).model.n_tokens == 0
    assert branches.sample(root) == branches.logits(root).argmax()


def test_evaluating_no_tokens_keeps_the_token_drawn(model: Model) -> None:
    branches = Branches(model, n_leases=1, n_ctx_seq=64, measure=True)
    root = branches.create(LONG[:10], RANDOM)
    token = branches.sample(root)
    branches.decode({root: []})
    branches.prefill(root, [])
    branches.accept(root, token)
    assert branches.metrics(root).sampling.perplexity < math.inf


def test_metrics_need_measure(branches: Branches) -> None:
    root = branches.create(LONG[:5])
    with pytest.raises(InvalidRequestError, match="measure=True"):
        branches.metrics(root)


def test_parent_and_children(branches: Branches) -> None:
    root = branches.create()
    child = branches.fork(root)
    assert (branches.parent(root), branches.parent(child), branches.children(root)) == (0, root, {child})
    branches.retain_only(child)
    assert branches.parent(child) == 0


def test_pressure_counts_cells_shared_with_the_parent_once(model: Model) -> None:
    branches = Branches(model, n_leases=4, n_ctx_seq=64, n_ctx=50)
    root = branches.create(LONG[:30])
    child = branches.fork(root)
    assert (branches.pressure().cells_used, branches.pressure().remaining) == (30, 20)
    branches.prefill(child, LONG[:15])
    with pytest.raises(CacheFull, match="6 tokens do not fit into the 5 free cells of 50"):
        branches.decode({root: [1, 2, 3], child: [4, 5, 6]})
    assert (len(branches.tokens(root)), len(branches.tokens(child))) == (30, 45)
    branches.prune(child)
    assert branches.pressure().cells_used == 30


def test_prune_subtree_deeper_than_the_recursion_limit(model: Model) -> None:
    depth = sys.getrecursionlimit() + 1
    branches = Branches(model, n_leases=depth + 1, n_ctx_seq=4)
    other, root = branches.create(), branches.create()
    leaf = root
    for _ in range(depth - 1):
        leaf = branches.fork(leaf)
    branches.prune_subtree(root)
    assert (len(branches), other in branches, leaf in branches) == (1, True, False)


@pytest.mark.parametrize("n_leases", [-1, 65537, 1.5])
def test_invalid_number_of_leases_is_refused(n_leases: float, model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="n_leases must be an integer from 0 to 65536"):
        Branches(model, n_leases=n_leases)


@pytest.mark.parametrize("n_ctx", [-1, math.nan, "9", True])
def test_invalid_number_of_cells_is_refused(n_ctx: int, model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="n_ctx must be an integer of at least 0"):
        Branches(model, n_leases=1, n_ctx=n_ctx)


def test_fork_and_create_need_a_free_lease(branches: Branches) -> None:
    root = branches.create([1])
    forks = [branches.fork(root) for _ in range(5)]
    with pytest.raises(CacheFull, match="all 6 leases are in use"):
        branches.fork(root)
    with pytest.raises(CacheFull):
        branches.create()
    branches.prune(forks[0])
    assert branches.fork(root) not in forks, "handles are never reused"


def test_failed_create_takes_no_lease_or_cell(branches: Branches) -> None:
    with pytest.raises(InvalidRequestError, match="index 1"):
        branches.create([1, 500])
    assert (len(branches), branches.pressure().cells_used) == (0, 0)
    [branches.create([1]) for _ in range(6)]


def test_failed_fork_takes_no_lease(branches: Branches, monkeypatch: pytest.MonkeyPatch) -> None:
    root = branches.create([1])

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("llamacli.session.Session.fork", fails)
        with pytest.raises(MemoryError):
            branches.fork(root)
    assert len(branches) == 1
    [branches.fork(root) for _ in range(5)]


def test_drain_releases_memory_and_closes(model: Model, branches: Branches) -> None:
    used = model.kv_pool().n_used_bytes
    root = branches.create(LONG[:20])
    branches.fork(root)
    branches.drain()
    branches.drain()
    assert model.kv_pool().n_used_bytes == used
    for call in (lambda: branches.tokens(root), branches.create):
        with pytest.raises(ClosedError, match="drained"):
            call()


@attrs.define(eq=False)
class Expected:
    """Expected branch.

    `head` tokens are shared with the parent; `model` and `sampling` are surprisals. `events` are all that draws depend
    on: seeds, steering, logits drawn from, and tokens accepted.
    """

    parent: int
    tokens: list[int]
    head: int
    logits: np.ndarray | None
    model: list[float] = attrs.field(factory=list)
    sampling: list[float] = attrs.field(factory=list)
    drawn: tuple[int, float] | None = None
    banned: int | None = None
    events: list[tuple[str, Any]] = attrs.field(factory=list)


DRAWING = SamplingParams(temperature=1.0, top_k=3, presence_penalty=0.5)


def ban(token: int) -> Callable[[Candidates], None]:
    return lambda candidates: candidates.keep_where(candidates.ids != token)


def perplexity(surprisals: list[float]) -> float:
    return math.exp(np.mean(surprisals)) if surprisals else math.inf


class BranchMachine(RuleBasedStateMachine):
    """`tree`: the expected branches by handle."""

    handles = Bundle("handles")
    model: Model

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches(self.model, n_leases=5, n_ctx_seq=40, n_ctx=90, measure=True)
        self.tree: dict[int, Expected] = {}

    def children(self, handle: int) -> set[int]:
        return {other for other, expected in self.tree.items() if expected.parent == handle}

    def subtree(self, handle: int) -> set[int]:
        return {handle}.union(*(self.subtree(child) for child in self.children(handle)))

    @property
    def used(self) -> int:
        return sum(len(expected.tokens) - expected.head for expected in self.tree.values())

    def fresh(self, tokens: list[int]) -> np.ndarray | None:
        """Logits of a new session."""
        return logits_after(self.model, tuple(tokens)) if tokens else None

    def redraw(self, events: list[tuple[str, Any]]) -> int:
        """Last token that a new session draws."""
        drawn = -1
        with self.model.create_session(n_ctx=40, seed=1234, reuse=False) as session:
            session.params = DRAWING
            for what, value in events:
                match what:
                    case "seed":
                        session.set_seed(value)
                    case "accept":
                        session.accept(value)
                    case "steer":
                        session.steer = None if value is None else ban(value)
                    case "draw":
                        session.logits = value
                        drawn = session.draw()
        return drawn

    def drawable(self, handle: int) -> bool:
        return handle in self.tree and self.tree[handle].logits is not None

    @rule(target=handles, tokens=st.lists(st.integers(0, 127), max_size=30))
    def create(self, tokens: list[int]) -> object:
        try:
            handle = self.branches.create(tokens, DRAWING)
        except CacheFull:
            assert len(self.tree) == 5 or self.used + len(tokens) > 90
            return multiple()
        assert handle not in self.tree
        self.tree[handle] = Expected(0, list(tokens), 0, self.fresh(tokens))
        return handle

    @rule(target=handles, handle=handles, clone_logits=st.booleans())
    def fork(self, handle: int, clone_logits: bool) -> object:
        try:
            child = self.branches.fork(handle, clone_logits=clone_logits)
        except InvalidRequestError:
            assert handle not in self.tree
            return multiple()
        except CacheFull:
            assert len(self.tree) == 5
            return multiple()
        expected = self.tree[handle]
        self.tree[child] = Expected(
            handle,
            list(expected.tokens),
            len(expected.tokens),
            expected.logits if clone_logits else None,
            list(expected.model),
            list(expected.sampling),
            expected.drawn if clone_logits else None,
            events=[*expected.events, ("steer", None)],
        )
        return child

    @rule(work=st.dictionaries(handles, st.lists(st.integers(0, 127), max_size=5), max_size=4))
    def decode(self, work: dict[int, list[int]]) -> None:
        valid = work.keys() <= self.tree.keys()
        fits = valid and all(len(self.tree[handle].tokens) + len(tokens) <= 40 for handle, tokens in work.items())
        try:
            self.branches.decode(work)
        except Exception:
            assert not fits or self.used + sum(map(len, work.values())) > 90
            return
        assert fits
        for handle, tokens in work.items():
            expected = self.tree[handle]
            expected.tokens.extend(tokens)
            if tokens:
                expected.logits, expected.drawn = self.fresh(expected.tokens), None

    @rule(handle=handles)
    def sample(self, handle: int) -> None:
        try:
            token = self.branches.sample(handle)
        except InvalidRequestError:
            assert not self.drawable(handle)
            return
        expected = self.tree[handle]
        assert expected.logits is not None
        expected.events.append(("draw", expected.logits))
        assert token == self.redraw(expected.events)
        logits = expected.logits.copy()
        for accepted in {value for what, value in expected.events if what == "accept"}:
            logits[accepted] -= 0.5
        if expected.banned is not None:
            logits[expected.banned] = -np.inf
        kept = np.flatnonzero(logits >= np.sort(logits)[-3])
        expected.drawn = token, -float(log_softmax(logits[kept])[kept.tolist().index(token)])

    @rule()
    def sample_each(self) -> None:
        for handle in self.tree:
            self.sample(handle)

    @rule(handle=handles, seed=st.integers(0, 3))
    def set_seed(self, handle: int, seed: int) -> None:
        if handle in self.tree:
            self.branches.set_seed(handle, seed)
            self.tree[handle].events.append(("seed", seed))

    @rule(handle=handles)
    def set_steer(self, handle: int) -> None:
        """Ban the likeliest token."""
        if self.drawable(handle):
            expected = self.tree[handle]
            expected.banned = int(np.argmax(expected.logits))
            self.branches.set_steer(handle, ban(expected.banned))
            expected.events.append(("steer", expected.banned))

    @rule(handle=handles, token=st.one_of(st.none(), st.integers(0, 127)))
    def accept(self, handle: int, token: int | None) -> None:
        expected = self.tree.get(handle)
        if token is None:
            token = expected.drawn[0] if expected is not None and expected.drawn is not None else 0
        try:
            self.branches.accept(handle, token)
        except InvalidRequestError:
            assert expected is None
            return
        assert expected is not None
        if expected.logits is not None:
            surprisal = -float(log_softmax(expected.logits)[token])
            expected.model += [surprisal] if surprisal < math.inf else []
        if expected.drawn is not None and expected.drawn[0] == token:
            expected.sampling.append(expected.drawn[1])
        expected.drawn = None
        expected.events.append(("accept", token))

    @rule(handle=handles, other=handles, weight=st.sampled_from([-1.0, -0.5, 0.5]), alpha=st.sampled_from([0.0, 0.1]))
    def merge(self, handle: int, other: int, weight: float, alpha: float) -> None:
        weights = {other: weight, handle: 1.0}
        merged = None
        if self.drawable(handle) and self.drawable(other):
            logs = {each: log_softmax(self.tree[each].logits) for each in weights}
            with np.errstate(invalid="ignore"):
                merged = sum(weights[each] * logs[each] for each in weights)
            unlikely = logs[handle] < logs[handle].max() + (math.log(alpha) if alpha else -math.inf)
            merged[unlikely | ~np.isfinite(merged)] = -np.inf
        try:
            self.branches.merge_logits(handle, weights, alpha=alpha)
        except InvalidRequestError:
            assert merged is None or merged.max() == -np.inf
            return
        assert merged is not None
        np.testing.assert_allclose(self.branches.logits(handle), merged, rtol=1e-4, atol=1e-4)
        expected = self.tree[handle]
        expected.logits, expected.drawn = self.branches.logits(handle).copy(), None

    @rule(handle=handles)
    def prune(self, handle: int) -> None:
        allowed = handle in self.tree and not self.children(handle)
        try:
            self.branches.prune(handle)
        except InvalidRequestError:
            assert not allowed
        else:
            assert allowed
            del self.tree[handle]

    @rule(handle=handles)
    def prune_subtree(self, handle: int) -> None:
        if handle in self.tree:
            self.branches.prune_subtree(handle)
            for gone in self.subtree(handle):
                del self.tree[gone]

    @rule(handle=consumes(handles))
    def retain_only(self, handle: int) -> None:
        if handle in self.tree:
            self.branches.retain_only(handle)
            self.tree = {handle: attrs.evolve(self.tree[handle], parent=0, head=0)}

    @invariant()
    def tokens_and_relations_match_the_tree(self) -> None:
        assert len(self.branches) == len(self.tree)
        assert self.branches.pressure().cells_used == self.used
        for handle, expected in self.tree.items():
            assert list(self.branches.tokens(handle)) == expected.tokens
            assert self.branches.children(handle) == self.children(handle)
            assert self.branches.parent(handle) == expected.parent
        cells = {int(page) for seq in range(5) for page in self.branches._cache.sequence(seq).tables[0] if page}
        assert self.branches._cache.pool.groups[0].n_used == len(cells)

    @invariant()
    def logits_and_metrics_match(self) -> None:
        for handle, expected in self.tree.items():
            if expected.logits is not None:
                np.testing.assert_array_equal(self.branches.logits(handle), expected.logits)
            metrics = self.branches.metrics(handle)
            assert metrics.model.perplexity == pytest.approx(perplexity(expected.model), rel=1e-4)
            assert metrics.sampling.perplexity == pytest.approx(perplexity(expected.sampling), rel=1e-4)

    def teardown(self) -> None:
        self.branches.drain()
        assert self.model.kv_pool().n_used_bytes == 0


@pytest.fixture(scope="module", params=["gqa", "gemma3", "qwen35"])
def machine(request: pytest.FixtureRequest, tiny_gguf, plugins) -> type[RuleBasedStateMachine]:
    """Machine of a model with full attention, sliding windows, recurrent states."""
    BranchMachine.model = load_model(tiny_gguf(request.param), "fp32", plugins=plugins, engine=default_engine())
    BranchMachine.model.prefix_cache_bytes = 0  # all pages are those of branches
    return BranchMachine


@pytest.mark.deep
def test_random_operations_match_a_tree_of_lists(machine) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=examples(80, stateful_step_count=30))
