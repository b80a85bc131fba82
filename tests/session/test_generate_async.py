"""`Session.generate_async`."""

import asyncio
import contextlib

import pytest

from llamacli import InvalidRequestError, Model, Session
from sessions import PROMPT, RANDOM


def test_equals_generate(model: Model, session: Session) -> None:
    async def main() -> list[int]:
        return [token.id async for token in session.generate_async(PROMPT, RANDOM, max_tokens=12)]

    with model.create_session() as other:
        assert asyncio.run(main()) == [token.id for token in other.generate(PROMPT, RANDOM, max_tokens=12)]
        assert (session.tokens, session.stats.n_gen) == (other.tokens, 12)


def test_sessions_run_at_once(model: Model) -> None:
    async def one(seed: int) -> list[int]:
        with model.create_session(seed=seed) as session:
            return [token.id async for token in session.generate_async(PROMPT, RANDOM, max_tokens=8)]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*map(one, range(4)))

    async def in_turn() -> list[list[int]]:
        return [await one(seed) for seed in range(4)]

    assert asyncio.run(main()) == asyncio.run(in_turn())


def test_leaving_the_loop_frees_the_session(session: Session) -> None:
    async def main() -> None:
        async with contextlib.aclosing(session.generate_async(PROMPT, max_tokens=20)) as tokens:
            async for _ in tokens:
                break
        assert len([token async for token in session.generate_async([], max_tokens=3)]) == 3

    asyncio.run(main())
    assert session.n_past == len(PROMPT) + 3


def test_errors_are_raised_at_once(session: Session) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        session.generate_async(PROMPT, max_tokens=-2)
