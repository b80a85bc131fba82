"""Candidates and logits for tests of samplers."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llamacli.sampling import Candidates, Sampler, SamplerChain, SamplerState, SamplingParams

Logits = np.ndarray

FINITE = st.floats(-30, 30, width=32)
LOGITS = st.one_of(
    hnp.arrays(np.float32, st.integers(1, 40), elements=FINITE),
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([-2.0, 0.0, 0.5, 3.0])),
)
"""Logits of all kinds, some with many equal values."""

EXTREME = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.one_of(
        st.sampled_from([-np.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, 7.0]), st.floats(-1e6, 1e6, width=32)
    ),
).filter(lambda logits: logits.max() > -np.inf)
"""Logits of which at least one can be drawn."""


def start(logits: Sequence[float] | Logits, history: Sequence[int] = (), seed: int = 1) -> Candidates:
    """Candidates of all tokens of a vocabulary."""
    candidates = Candidates(np.random.default_rng(seed), list(history))
    candidates.start(np.array(logits, np.float32))
    return candidates


def apply(
    logits: Sequence[float] | Logits, *samplers: Sampler, history: Sequence[int] = (), seed: int = 1
) -> Candidates:
    """Candidates after some samplers."""
    candidates = start(logits, history, seed)
    SamplerChain(samplers).apply(candidates)
    return candidates


def distribution(candidates: Candidates) -> dict[int, float]:
    """Probabilities by id."""
    return dict(zip(candidates.ids.tolist(), candidates.probabilities().tolist(), strict=True))


def exact_softmax(logits: Logits) -> np.ndarray:
    """Probabilities in float64, by the definition."""
    e = np.exp(logits.astype(np.float64) - logits.max())
    return e / e.sum()


def log_softmax(logits: Logits) -> np.ndarray:
    """Logarithms of probabilities in float64, by the definition."""
    wide = logits.astype(np.float64) - logits.max()
    return wide - np.log(np.exp(wide).sum())


def draw(logits: Logits, params: SamplingParams, *, history: Sequence[int] = (), seed: int = 1) -> int:
    """Draw a token."""
    state = SamplerState(seed)
    for token in history:
        state.accept(token)
    return state.sample(logits.copy(), params)


def counts(
    logits: Sequence[float], params: SamplingParams | SamplerChain, n: int = 4000, seed: int = 1234
) -> np.ndarray:
    """Count each token in n draws."""
    state, logits = SamplerState(seed), np.array(logits, np.float32)
    return np.bincount([state.sample(logits.copy(), params) for _ in range(n)], minlength=len(logits))
