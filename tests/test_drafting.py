"""Time budget of drafts."""

import pytest

from llamacli.drafting import MAX_COST, Budget


def spend(budget: Budget, n_texts: int, *, n_drafted: int, n_accepted: int, longer: float = 0.5) -> tuple[int, float]:
    """Draft wherever that is allowed; the number of drafts and their cost.

    Passes take 1 second, and `longer` more with a draft.
    """
    n_drafts, cost = 0, 0.0
    for _ in range(n_texts):
        if not budget.allows:
            budget.add_pass(1, 1.0)
            continue
        budget.add_drafting(0.01)
        budget.add_pass(1 + n_drafted, 1.0 + longer)
        budget.settle(1 + n_drafted, n_accepted)
        n_drafts += 1
        cost += longer + 0.01 - n_accepted
    return n_drafts, cost


def test_nothing_is_drafted_before_a_pass_was_timed() -> None:
    budget = Budget()
    assert not budget.allows
    budget.add_pass(5, 1.0)
    assert not budget.allows
    budget.add_pass(1, 1.0)
    assert budget.allows


@pytest.mark.parametrize("longer", [0.1, 0.5, 2.0])
def test_drafts_in_vain_cost_one_pass_and_their_share(longer: float) -> None:
    budget = Budget()
    budget.add_pass(1, 1.0)
    n_drafts, cost = spend(budget, 1000, n_drafted=3, n_accepted=0, longer=longer)
    assert n_drafts > 2
    assert MAX_COST * 900 < cost < 1 + longer + MAX_COST * 1100


def test_drafts_that_pay_go_on() -> None:
    budget = Budget()
    budget.add_pass(1, 1.0)
    assert spend(budget, 500, n_drafted=3, n_accepted=1)[0] == 500


def test_long_drafting_counts() -> None:
    budget = Budget()
    budget.add_pass(1, 1.0)
    for _ in range(3):
        budget.add_drafting(0.5)
    assert not budget.allows


def test_a_pause_of_the_machine_is_not_a_cost_of_drafts() -> None:
    budget = Budget()
    for _ in range(5):
        budget.add_pass(1, 1.0)
        budget.add_drafting(0.01)
        budget.add_pass(4, 1.2)
        budget.settle(4, 1)
    budget.add_drafting(100.0)
    budget.add_pass(4, 100.0)
    budget.settle(4, 1)
    assert budget.allows


def test_tokens_that_are_evaluated_again_count() -> None:
    budget = Budget()
    budget.add_pass(1, 1.0)
    for _ in range(3):
        budget.add_pass(5, 1.5)
        budget.settle(5, 2)
    for _ in range(6):
        assert budget.allows
        budget.add_pass(3, 2.0)
        budget.settle(3, 0)
    assert not budget.allows
