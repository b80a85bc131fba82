import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.branches.slot_map import SlotMap


@given(st.lists(st.integers(0, 5)))
def test_handles_are_never_reused_and_never_zero(removals: list[int]) -> None:
    slots = SlotMap[int]()
    expected: dict[int, int] = {}
    seen = {0}
    for value, choice in enumerate(removals):
        handle = slots.add(value)
        assert handle not in seen
        seen.add(handle)
        expected[handle] = value
        if choice < len(expected):
            gone = list(expected)[choice]
            del expected[gone]
            slots.remove(gone)
            assert gone not in slots
            assert slots.get(gone) is None
            with pytest.raises(KeyError):
                slots.remove(gone)
        assert {handle: slots[handle] for handle in slots} == expected
        assert (list(slots.values()), len(slots)) == (list(expected.values()), len(expected))
    slots.clear()
    assert len(slots) == 0
    assert slots.add(1) not in seen
