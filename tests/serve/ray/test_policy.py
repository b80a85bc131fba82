"""Routing policy: properties of the cost and of the fleet's bookkeeping."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from llamacli.serve.ray.blocks import BLOCK, chain_hashes
from llamacli.serve.ray.policy import FORGET_S, SUSPECT_S, Fleet, Load, cost_s, n_uncached

PROMPT = list(range(4 * BLOCK + 10))
HASHES = chain_hashes(PROMPT)
OTHER = chain_hashes(PROMPT[::-1])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


loads = st.builds(
    Load,
    running=st.integers(0, 12),
    waiting=st.integers(0, 20),
    slots=st.integers(1, 12),
    tokens=st.integers(0, 5000),
    base_s=st.floats(0, 0.1),
    row_s=st.floats(1e-5, 0.01),
    output=st.floats(1, 500),
    blocks=st.integers(0, len(HASHES)).map(lambda n: frozenset(HASHES[:n])),
)


@given(loads)
def test_every_kind_of_load_costs_time(load: Load) -> None:
    cost = cost_s(HASHES, len(PROMPT), load)
    assert cost > 0
    assert cost_s(HASHES, len(PROMPT), attrs.evolve(load, tokens=load.tokens + 1)) > cost
    assert cost_s(HASHES, len(PROMPT), attrs.evolve(load, running=load.running + 1)) > cost
    assert cost_s(HASHES, len(PROMPT), attrs.evolve(load, waiting=load.waiting + 1)) >= cost
    held = attrs.evolve(load, blocks=frozenset(HASHES))
    assert cost_s(HASHES, len(PROMPT), held) <= cost
    assert cost_s(HASHES, len(PROMPT) + BLOCK, load) > cost


def test_cached_blocks_cost_nothing_but_one_token_is_always_computed() -> None:
    assert n_uncached(HASHES, len(PROMPT), frozenset()) == len(PROMPT)
    assert n_uncached(HASHES, len(PROMPT), frozenset(HASHES[:3])) == len(PROMPT) - 3 * BLOCK
    assert n_uncached(HASHES[:1], BLOCK, frozenset(HASHES)) == 1
    assert n_uncached(OTHER, len(PROMPT), frozenset(HASHES)) == len(PROMPT)


def test_locality_and_balance_are_one_number() -> None:
    fleet = Fleet()
    fleet.keep(["cached", "idle"])
    cached = Load(running=1, base_s=0.025, row_s=0.002, blocks=frozenset(HASHES))
    fleet.report("cached", cached, [])
    fleet.report("idle", Load(base_s=0.025, row_s=0.002), [])
    assert fleet.order(HASHES, len(PROMPT)) == ["cached", "idle"], "a stream costs less than the prompt"
    assert fleet.order(OTHER, len(PROMPT)) == ["idle", "cached"]
    fleet.report("cached", attrs.evolve(cached, running=3), [])
    assert fleet.order(HASHES, len(PROMPT)) == ["idle", "cached"], "three cost more than the prompt"


def test_slower_replicas_get_less_and_unmeasured_ones_count_as_usual() -> None:
    fleet = Fleet()
    fleet.keep(["fast", "slow", "new"])
    fleet.report("fast", Load(running=1, base_s=0.01, row_s=0.001), [])
    fleet.report("slow", Load(base_s=0.03, row_s=0.003), [])
    assert fleet.order((), 1000) == ["fast", "new", "slow"]


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 300))
def test_equal_requests_are_spread_or_stay_where_their_prefix_is(names: list[str], n_tokens: int) -> None:
    fleet = Fleet("ingress", Clock())
    fleet.keep("abc")
    for i in range(9):
        fleet.route(f"call {i}", fleet.order((), n_tokens)[0], (), n_tokens)
    assert [fleet.load(name).running for name in "abc"] == [3, 3, 3]
    for i, name in enumerate(names):
        fleet.route(f"more {i}", name, (), n_tokens)
    counts = {name: 3 + names.count(name) for name in "abc"}
    for name in "abc":
        load = fleet.load(name)
        assert load.running + load.waiting == counts[name]
        assert load.running <= load.slots
        assert load.tokens == counts[name] * n_tokens
    least = min(counts.values())
    assert counts[fleet.order((), n_tokens)[0]] == least


def test_what_was_sent_counts_until_a_report_covers_it() -> None:
    clock = Clock()
    fleet = Fleet("", clock)
    fleet.keep(["a", "b"])
    fleet.route("1", "a", HASHES, len(PROMPT))
    fleet.route("2", "a", HASHES, len(PROMPT))
    load = fleet.load("a")
    assert (load.running, load.tokens) == (2, len(PROMPT) + len(PROMPT) - 4 * BLOCK), "the second shares the first's"
    assert load.blocks == frozenset(HASHES)
    fleet.report("a", Load(running=1), ["1"])
    assert fleet.load("a").running == 2
    fleet.report("a", Load(running=2), ["1", "2"])
    assert fleet.load("a").running == 2
    fleet.route("3", "a", (), 10)
    fleet.route("3", "b", (), 10)
    assert (fleet.load("a").running, fleet.load("b").running) == (2, 1), "it was sent elsewhere in the end"
    clock.now += FORGET_S + 1
    assert fleet.load("b").running == 0, "a call that is never confirmed counts no more"


def test_replicas_come_and_go() -> None:
    fleet = Fleet()
    assert fleet.order((), 1) == []
    fleet.keep(["a", "b"])
    fleet.route("1", "a", (), 10)
    fleet.keep(["b", "c"])
    fleet.report("a", Load(running=9), [])
    assert sorted(fleet.replicas) == ["b", "c"]
    assert fleet.order((), 1, avoid=["b"]) == ["c"]
    assert fleet.order((), 1, among=["a", "b"]) == ["b"]
    fleet.keep(["a"])
    assert fleet.load("a").running == 0, "a new replica is idle"


def test_a_silent_replica_comes_last_until_it_reports() -> None:
    clock = Clock()
    fleet = Fleet("", clock)
    fleet.keep(["a", "b"])
    fleet.report("b", Load(running=5, row_s=0.01, base_s=0.1), [])
    fleet.route("1", "a", (), 10)
    assert fleet.place("1") == "a"
    fleet.suspect("a")
    fleet.suspect("gone")
    assert fleet.order((), 1) == ["b", "a"]
    assert fleet.order((), 1, avoid=["b"]) == ["a"]
    fleet.report("a", Load(), ["1"])
    assert fleet.place("1") == ""
    assert fleet.order((), 1) == ["a", "b"]
    fleet.suspect("a")
    clock.now += SUSPECT_S + 1
    assert fleet.order((), 1) == ["a", "b"]


def test_ingresses_prefer_different_replicas_among_equals() -> None:
    names = [f"replica {i}" for i in range(16)]
    firsts = set()
    for ingress in range(32):
        fleet = Fleet(str(ingress))
        fleet.keep(names)
        firsts.add(fleet.order((), 1)[0])
    assert len(firsts) > 4
