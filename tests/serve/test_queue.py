"""Fair queue: turns of keys, limits, numbers."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.serve.errors import QueueFullError
from llamacli.serve.queue import FairQueue


@attrs.frozen
class Item:
    key: str
    name: int = 0
    n_tokens: int = 1
    n_requests: int = 1
    background: bool = False


def take(queue: FairQueue[Item]) -> Item:
    item = queue.peek()
    assert item is not None
    queue.take(item)
    return item


def drained(queue: FairQueue[Item]) -> list[Item]:
    return [take(queue) for _ in range(len(queue))]


def test_keys_take_turns_and_are_in_order_within() -> None:
    queue: FairQueue[Item] = FairQueue(100, 100)
    for key, name in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)):
        queue.put([Item(key, name)])
    assert queue.peek() == Item("a", 1)
    assert [item.name for item in drained(queue)] == [1, 4, 5, 2, 6, 3]
    assert queue.peek() is None


def test_prompts_of_one_request_count_as_one() -> None:
    queue: FairQueue[Item] = FairQueue(1, 100)
    queue.put([Item("a", 1), Item("a", 2, n_requests=0)])
    assert (len(queue), queue.n_requests, queue.n_tokens) == (2, 1, 2)
    with pytest.raises(QueueFullError):
        queue.put([Item("a", 3)])
    assert [item.name for item in drained(queue)] == [1, 2]


def test_a_request_is_refused_whole() -> None:
    queue: FairQueue[Item] = FairQueue(10, 5, retry_after=lambda: 7)
    queue.put([Item("a", 1, 4)])
    with pytest.raises(QueueFullError, match="5 tokens are allowed") as error:
        queue.put([Item("a", 2), Item("a", 3, n_requests=0)])
    assert error.value.retry_after == 7
    assert (error.value.status, error.value.code) == (429, "queue_full")
    assert (len(queue), queue.n_requests, queue.n_tokens) == (1, 1, 4)


def test_room_for_any_request() -> None:
    queue: FairQueue[Item] = FairQueue(2, 5)
    queue.expect_room()
    queue.put([Item("a", n_tokens=4)])
    queue.expect_room()
    queue.put([Item("a")])
    with pytest.raises(QueueFullError, match="2 requests wait already, 2 are allowed") as error:
        queue.expect_room()
    assert error.value.retry_after == 1
    take(queue)
    take(queue)
    queue.put([Item("a", n_tokens=5)])
    with pytest.raises(QueueFullError, match="prompts of 5 tokens wait already, 5 tokens are allowed"):
        queue.expect_room()


def test_open_requests_of_a_key_are_limited_until_they_are_closed() -> None:
    queue: FairQueue[Item] = FairQueue(10, 100, max_per_key=1)
    queue.put([Item("a")])
    take(queue)
    with pytest.raises(QueueFullError, match="of this key"):
        queue.put([Item("a")])
    queue.put([Item("b")])
    queue.closed("a")
    queue.put([Item("a")])


def test_other_open_requests_of_a_key_count_on() -> None:
    queue: FairQueue[Item] = FairQueue(10, 100, max_per_key=2)
    queue.put([Item("a")])
    queue.put([Item("a")])
    queue.closed("a")
    queue.put([Item("a")])
    with pytest.raises(QueueFullError, match="2 requests of this key wait or run already"):
        queue.put([Item("a")])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=30), st.integers(0, 9))
def test_numbers_agree_with_the_entries(specs: list[tuple[str, int]], limit: int) -> None:
    queue: FairQueue[Item] = FairQueue(1000, 1000)
    for i, (key, n) in enumerate(specs):
        queue.put([Item(key, i, n)])
    removed = queue.remove_where(lambda item: item.n_tokens > limit)
    assert {item.name for item in removed} == {i for i, (_, n) in enumerate(specs) if n > limit}
    left = [(i, key, n) for i, (key, n) in enumerate(specs) if n <= limit]
    assert (len(queue), queue.n_requests, queue.n_tokens) == (len(left), len(left), sum(n for *_, n in left))
    taken = drained(queue)
    assert sorted(item.name for item in taken) == [i for i, *_ in left]
    for key in "abc":
        names = [item.name for item in taken if item.key == key]
        assert names == sorted(names)
    assert queue.n_requests == queue.n_tokens == 0


def test_free_places_do_not_count_as_waiting() -> None:
    free = [2]
    queue: FairQueue[Item] = FairQueue(1, 100, n_free=lambda: free[0])
    for name in range(3):
        queue.put([Item("a", name)])
    with pytest.raises(QueueFullError):
        queue.put([Item("a", 3)])
    drained(queue)
    free[0] = 0
    queue.put([Item("a", 4)])
    with pytest.raises(QueueFullError):
        queue.put([Item("a", 5)])


@given(st.lists(st.one_of(st.sampled_from("abcd"), st.none()), max_size=80))
def test_a_key_that_waits_sees_no_other_served_twice(actions: list[str | None]) -> None:
    """Random arrivals by key, and departures (None)."""
    queue: FairQueue[Item] = FairQueue(1000, 1000)
    served: dict[str, list[str]] = {}  # by key that waits: the keys served since its last turn
    waiting: dict[str, int] = {}
    for key in [*actions, *[None] * len(actions)]:
        if key is not None:
            queue.put([Item(key)])
            waiting[key] = waiting.get(key, 0) + 1
            served.setdefault(key, [])
        elif len(queue):
            taken = take(queue).key
            waiting[taken] -= 1
            for other in [other for other, n in waiting.items() if n and other != taken]:
                served[other].append(taken)
                assert len(served[other]) == len(set(served[other])), "another key was served twice meanwhile"
            served[taken] = []
    assert not len(queue)


def test_background_entries_come_last_and_count_for_no_limit() -> None:
    queue: FairQueue[Item] = FairQueue(1, 10, 1)
    for name in range(5):
        queue.put([Item("a", name, background=True)])
    queue.put([Item("a", 9)])
    assert (len(queue), queue.n_requests) == (6, 1)
    assert [one.name for one in queue.remove_where(lambda one: one.name == 2)] == [2]
    assert [item.name for item in drained(queue)] == [9, 0, 1, 3, 4]
