"""Token sequences, and sessions that have evaluated them."""

import numpy as np

from llamacli import Model, SamplingParams, Session

PROMPT = [5, 17, 101, 3, 77, 42, 9, 64]
LONG = np.random.RandomState(7).randint(0, 128, 100).tolist()
TOKENS = LONG[:40]
RANDOM = SamplingParams(temperature=1.0, top_k=40)


def fresh(model: Model, tokens: list[int], **options: object) -> Session:
    """Session that has evaluated `tokens` itself, without the prefix cache."""
    session = model.create_session(reuse=False, **options)
    session.eval(tokens)
    return session


def logits_after(model: Model, tokens: list[int]) -> np.ndarray:
    """Logits after the last of `tokens`."""
    with model.create_session() as session:
        session.eval(tokens)
        return session.logits
