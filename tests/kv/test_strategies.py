from llamacli.kv import CacheStrategy


def test_should_cache_by_length_and_memory() -> None:
    cases = [(1, None), (257, None), (513, 2048 * 513 + 1), (513, 0)]
    decisions = {
        strategy.value: [strategy.should_cache(n, memory) for n, memory in cases]
        for strategy in CacheStrategy
    }  # fmt: skip
    assert decisions == {
        "always": [True] * 4,
        "long_sequence_only": [False, False, True, True],
        "adaptive": [False, True, True, False],
        "disabled": [False] * 4,
    }
