"""Controller of drafts: lengths by acceptance, time of steps and memory."""

import logging
import random
from collections.abc import Sequence

import attrs
import pytest

from llamacli.generation.costs import StepCost
from llamacli.generation.drafting import Draft
from llamacli.generation.drafts import Drafts


class Clock:
    """Clock that drafting moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@attrs.define
class Zeros:
    """Drafter of zeros, each of which takes some seconds."""

    clock: Clock
    seconds: float = 0.0
    fails: bool = False

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        if self.fails:
            raise MemoryError
        self.clock.now += limit * self.seconds
        return [0] * limit


@attrs.define
class Silent:
    """Drafter that takes some seconds and proposes nothing."""

    clock: Clock
    seconds: float
    n: int = 0

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        self.clock.now += self.seconds
        self.n += 1
        return []


@attrs.define
class Running:
    """Sequence with one token to evaluate."""

    draft: Draft | None
    n_left: int = 1000
    n_missing: int = 1
    context: Sequence[int] = (1, 2)

    def drop_draft(self) -> None:
        self.draft = None


def costs(base: float, per_row: float) -> StepCost:
    """Cost of steps that were observed."""
    cost = StepCost()
    for rows in (1, 2, 4, 8, 16, 17):
        cost.observe(rows, base + per_row * rows)
    return cost


def generate(base: float, per_row: float, chance: float, *, drafting: float = 0.0, n: int = 2000) -> tuple[float, int]:
    """Seconds of n tokens relative to no drafts, and tokens drafted."""
    clock, cost, numbers = Clock(), StepCost(), random.Random(1)
    draft = Draft(Zeros(clock, drafting), 16)
    drafts, sequence, done = Drafts(cost, clock=clock), Running(draft), 0
    while done < n:
        drafts.propose([sequence])
        rows = 1 + len(draft.tokens)
        clock.now += base + per_row * rows
        cost.observe(rows, base + per_row * rows)
        done += 1
        while draft.accepts(0 if numbers.random() < chance else 1):
            done += 1
        if draft.tokens:
            draft.settle()
    return clock.now / (n * (base + per_row)), draft.n_drafted_in_all


@pytest.mark.parametrize("drafting", [0.0, 0.01])
def test_drafts_that_pay_are_long(drafting: float) -> None:
    seconds, _ = generate(1.0, 0.02, 0.95, drafting=drafting)
    assert seconds < 0.2 + drafting


@pytest.mark.parametrize(("per_row", "drafting"), [(0.05, 0.0), (0.5, 0.0), (2.0, 0.0), (0.05, 0.5)])
def test_drafts_in_vain_cost_little(per_row: float, drafting: float) -> None:
    seconds, n_drafted = generate(1.0, per_row, 0.0, drafting=drafting)
    assert 0 < n_drafted < 1000
    assert seconds < 1.05


@pytest.mark.parametrize("seconds", [0.05, 0.3, 2.0])
def test_a_drafter_that_proposes_nothing_is_seldom_asked(seconds: float) -> None:
    clock, cost = Clock(), StepCost()
    drafter = Silent(clock, seconds)
    drafts, sequence = Drafts(cost, clock=clock), Running(Draft(drafter, 16))
    for _ in range(2000):
        drafts.propose([sequence])
        clock.now += 1.0
        cost.observe(1, 1.0)
    assert drafter.n > 2
    assert clock.now < 2000 * 1.02


def test_a_rate_between_is_never_worse_than_no_drafts() -> None:
    for chance in (0.2, 0.5, 0.8):
        for per_row in (0.02, 0.2, 1.0):
            assert generate(1.0, per_row, chance)[0] < 1.06


def test_the_first_draft_is_short_and_comes_after_a_timed_step() -> None:
    drafts, draft = Drafts(StepCost()), Draft(Zeros(Clock()), 16)
    drafts.propose([Running(draft)])
    assert len(draft.tokens) == 0
    drafts.cost.observe(1, 1.0)
    drafts.propose([Running(draft)])
    assert len(draft.tokens) == 4


def test_a_draft_fits_into_the_rest_of_the_text() -> None:
    draft = Draft(Zeros(Clock()), 16)
    Drafts(costs(1.0, 0.01)).propose([Running(draft, n_left=3)])
    assert len(draft.tokens) == 2
    Drafts(costs(1.0, 0.01)).propose([Running(draft, n_left=1)])
    assert len(draft.tokens) == 0
    last = Running(Draft(Zeros(Clock(), fails=True), 16), n_left=1)
    Drafts(costs(1.0, 0.01)).propose([last])
    assert last.draft is not None, "nothing was drafted"


def test_a_draft_may_have_one_token() -> None:
    draft = Draft(Zeros(Clock()), 1)
    Drafts(costs(1.0, 0.01)).propose([Running(draft)])
    assert len(draft.tokens) == 1


def test_a_draft_may_have_the_most_tokens_of_its_drafter() -> None:
    draft = Draft(Zeros(Clock()), 10)
    drafts, sequence = Drafts(costs(1.0, 0.01)), Running(draft)
    for _ in range(8):
        drafts.propose([sequence])
        n_drafted = len(draft.tokens)
        while draft.accepts(0):
            pass
        draft.settle()
    assert n_drafted == 10


def test_a_step_stays_within_its_time() -> None:
    draft = Draft(Zeros(Clock()), 64)
    Drafts(costs(1.0, 0.01)).propose([Running(draft)], step_s=1.05)
    assert 0 < len(draft.tokens) <= 5


def test_sequences_without_memory_are_not_drafted() -> None:
    first, second = (Draft(Zeros(Clock()), 4) for _ in range(2))

    def reserve(sequence: Running, n: int, reserved: int) -> int | None:
        return reserved + 10 * n if reserved + 10 * n <= 145 else None

    Drafts(costs(1.0, 0.01), reserve).propose([Running(first), Running(second)], reserved=100)
    assert [len(first.tokens), len(second.tokens)] == [4, 0]


def test_an_error_of_a_drafter_ends_its_drafts(caplog: pytest.LogCaptureFixture) -> None:
    sequence = Running(Draft(Zeros(Clock(), fails=True), 4))
    with caplog.at_level(logging.WARNING):
        Drafts(costs(1.0, 0.01)).propose([sequence])
    assert sequence.draft is None
    assert "no more drafts for" in caplog.text
