"""Sessions in several threads."""

import gc
import threading

import numpy as np

from llamacli import (
    ClosedError,
    Model,
)
from sessions import LONG, fresh


def test_threads_with_a_session_each(model: Model) -> None:
    """Sessions in several threads share prefixes and generate what they would alone."""
    prompts = [[*LONG[:n], n] for n in (20, 33, 48, 48, 60)]
    with model.create_session(reuse=False) as session:
        expected = []
        for prompt in prompts:
            session.rewind(0)
            expected.append([token.id for token in session.generate(prompt, max_tokens=8)])
    wrong: list[object] = []

    def run(seed: int) -> None:
        random = np.random.RandomState(seed)
        for _ in range(12):
            i = random.randint(len(prompts))
            session = model.create_session()
            found = [token.id for token in session.generate(prompts[i], max_tokens=8)]
            if found != expected[i]:
                wrong.append((i, found))
            if random.randint(3):  # else left to the garbage collector
                session.close()

    model.prefix_cache_bytes = 1 << 16
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    model.prefixes(model.kv_pool().layout.kv_type, 256).clear()
    gc.collect()
    assert model.kv_pool().n_used_bytes == 0


def test_threads_with_one_session(model: Model) -> None:
    """In one session, and when it is closed while another thread evaluates."""
    session = model.create_session(n_ctx=200, reuse=False)

    def hammer() -> None:
        for token in LONG:
            session.eval([token, token])
            with session.lock:
                session.rewind(max(0, session.n_past - 3))

    threads = [threading.Thread(target=hammer) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = list(session.tokens)
    session.eval([5])
    np.testing.assert_array_equal(session.logits, fresh(model, [*tokens, 5]).logits)

    raised: list[Exception] = []
    began = threading.Event()

    def run() -> None:
        try:
            while True:
                session.rewind(0)
                session.eval(LONG)
                began.set()
        except ClosedError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    began.wait(60)
    session.close()
    thread.join(60)
    assert len(raised) == 1
