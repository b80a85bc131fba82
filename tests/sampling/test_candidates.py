"""Operations on candidates by custom samplers."""

from collections.abc import Callable

import numpy as np
import pytest

from candidates import start
from llamacli import InvalidRequestError, PluginError, SamplingParams
from llamacli.sampling import Candidates, Greedy, Sampler, SamplerChain, SamplerState, TopK, TopNSigma, as_logits


class Doing(Sampler):
    """Sampler that calls a function with the candidates."""

    def __init__(self, act: Callable[[Candidates], object]):
        self.act = act

    def apply(self, candidates: Candidates) -> None:
        self.act(candidates)


def sample(act: Callable[[Candidates], object]) -> int:
    return SamplerState(1).sample(np.arange(5, dtype=np.float32), SamplerChain([Doing(act), Greedy()]))


def lower(candidates: Candidates) -> None:
    candidates.logits -= 2 * candidates.ids.astype(np.float32)


def replace(candidates: Candidates) -> None:
    candidates.logits = -candidates.logits


@pytest.mark.parametrize(
    ("act", "token"),
    [
        (lower, 0),
        (replace, 0),
        (lambda candidates: candidates.keep([1, 3]), 3),
        (lambda candidates: candidates.keep_where(candidates.ids < 2), 1),
        (lambda candidates: candidates.keep_where([True, True, False, False, False]), 1),
        (lambda candidates: candidates.keep_from(3.5), 4),
        (lambda candidates: candidates.choose(2), 2),
        (lambda candidates: candidates.logits.fill(0), 0),
    ],
)
def test_operations(act: Callable[[Candidates], object], token: int) -> None:
    assert sample(act) == token


def test_masks_may_be_strided() -> None:
    mask = np.array([True, False, False, False, False, False, False, False, True, False])
    assert sample(lambda candidates: candidates.keep_where(mask[::2])) == 4


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda candidates: candidates.keep_where(np.ones(4, np.bool_)), r"bool \[4\] is not bool \[5\]"),
        (lambda candidates: candidates.keep_where(np.ones(5)), r"float64 \[5\] is not bool \[5\]"),
        (lambda candidates: candidates.falling_order(np.ones(6, np.float32)), r"float32 \[6\] is not float32 \[5\]"),
        (lambda candidates: candidates.kth_largest(0), "k = 0 must be from 1 to 5"),
        (lambda candidates: candidates.kth_largest(6), "k = 6 must be from 1 to 5"),
        (lambda candidates: candidates.keep([]), "sampler Doing leaves no token"),
        (lambda candidates: candidates.logits.fill(-np.inf), "logit of token 0 is -inf"),
        (lambda candidates: candidates.logits.fill(np.nan), "logit of token 0 is nan"),
    ],
)
def test_invalid_operations_are_refused(act: Callable[[Candidates], object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        sample(act)


def test_errors_name_the_sampler() -> None:
    def shorten(candidates: Candidates) -> None:
        candidates.logits = candidates.logits[:3]

    def widen(candidates: Candidates) -> None:
        candidates.logits = candidates.logits.astype(np.float64)

    with pytest.raises(PluginError, match=r"sampler Doing left logits that are float32 \[3\], not float32 \[5\]"):
        sample(shorten)
    with pytest.raises(PluginError, match=r"sampler Doing left logits that are float64 \[5\]"):
        sample(widen)
    with pytest.raises(PluginError, match="sampler Doing failed: ZeroDivisionError"):
        sample(lambda candidates: 1 / 0)


class Restricting(Doing):
    """Sampler that calls a function in `restrict`."""

    def restrict(self, candidates: Candidates) -> None:
        self.act(candidates)


def test_errors_in_restrict_name_the_sampler() -> None:
    logits = np.arange(5, dtype=np.float32)
    with pytest.raises(PluginError, match="sampler Restricting failed: ZeroDivisionError"):
        SamplerState(1).legal(logits, SamplerChain([Restricting(lambda candidates: 1 / 0), Greedy()]))
    with pytest.raises(InvalidRequestError, match="sampler Restricting leaves no token"):
        SamplerState(1).legal(logits, SamplerChain([Restricting(lambda candidates: candidates.keep([])), Greedy()]))
    evens = SamplerChain([Restricting(lambda candidates: candidates.keep_where(candidates.ids % 2 == 0)), Greedy()])
    assert SamplerState(1).legal(logits, evens).ids.tolist() == [0, 2, 4]


@pytest.mark.parametrize("logits", [None, 3.0, "abc", [[1.0], [2.0]], [[1.0], [2.0, 3.0]], ["a"]])
def test_invalid_logits_are_refused(logits: object) -> None:
    with pytest.raises(InvalidRequestError, match="logits"):
        as_logits(logits)


def test_logits_are_converted() -> None:
    row = np.arange(3, dtype=np.float32)
    assert as_logits(row) is row
    fixed = row.copy()
    fixed.flags.writeable = False
    for each in ([0, 1, 2], row.astype(np.float64), np.arange(6, dtype=np.float32)[::2] / 2, fixed):
        logits = as_logits(each)
        assert (logits.dtype, logits.flags.carray, logits.tolist()) == (np.float32, True, [0, 1, 2])
    assert as_logits([1e300, 0]).tolist() == [np.inf, 0]


def test_buffers_are_reused() -> None:
    candidates, logits = start(np.zeros(1000)), np.arange(1000, dtype=np.float32)
    places = set()
    for k in (10, 500, 10, 900):
        candidates.start(logits)
        TopK(k).apply(candidates)
        candidates.draw()
        places.add((candidates.ids.ctypes.data, candidates.logits.ctypes.data))
    assert len(places) == 1


def test_vocabulary_size_can_change() -> None:
    state = SamplerState(1)
    for n in (5, 9, 2):
        assert state.sample(np.arange(n, dtype=np.float32), SamplingParams(top_k=2)) == n - 1


def test_parameters_are_hashable() -> None:
    assert {SamplingParams(): 1, SamplingParams(options={"a": []}): 2}[SamplingParams()] == 1


def test_infinite_logits_are_not_drawn_from() -> None:
    candidates = Candidates(np.random.default_rng(0))
    with pytest.raises(InvalidRequestError, match="the largest logit is inf, of token 2: weights or keys"):
        candidates.start(np.array([0, 1, np.inf, -np.inf], np.float32))
    candidates.start(np.array([0, 1, 2, -np.inf], np.float32))
    assert len(candidates) == 4


def test_interrupted_start_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that come first are interrupted between two buffers."""
    candidates, logits = Candidates(np.random.default_rng(1)), np.arange(5, dtype=np.float32)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Candidates, "_allocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            candidates.start(logits)
    candidates.start(logits)
    TopK(2).apply(candidates)
    assert len(candidates) == 2


def test_a_token_that_was_removed_comes_back() -> None:
    candidates = Candidates(np.random.default_rng(0))
    candidates.start(np.array([0, 1, 2, -np.inf], np.float32))
    candidates.keep(2)
    for token in (None, 3):
        assert not candidates.restore(token)
        assert candidates.ids.tolist() == [2]
    assert candidates.restore(1)
    assert (candidates.ids.tolist(), candidates.logits.tolist()) == ([1], [1.0])


def test_ids_beyond_the_vocabulary_are_not_found() -> None:
    candidates = Candidates(np.random.default_rng(0))
    candidates.start(np.zeros(4, np.float32))
    assert [one.tolist() for one in candidates.find(np.array([4, 3], np.int32))] == [[3], [1]]


@pytest.mark.parametrize("k", [1, 200, 5000])
def test_kth_largest_by_heap_and_by_partition(k: int) -> None:
    candidates = Candidates(np.random.default_rng(0))
    candidates.start(np.random.default_rng(1).permutation(6000).astype(np.float32))
    assert candidates.kth_largest(k) == 6000 - k


def test_no_deviations_keep_all() -> None:
    candidates = Candidates(np.random.default_rng(0))
    candidates.start(np.arange(4, dtype=np.float32))
    TopNSigma(0).apply(candidates)
    assert len(candidates) == 4
