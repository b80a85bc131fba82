"""Fields of a step's record, as they are bound to buffers."""

import numpy as np
import pytest

from llamacli import PluginError
from llamacli.engine.steps import allocate, bind
from llamacli.kernels.layout import record
from llamacli.kv import N_BATCH
from llamacli.ops.lowering import Field, Slot, Step

X, Y = Slot("x", "f32", 40), Slot("y", "float32", 3)
BUFFERS = {slot: allocate(slot, N_BATCH) for slot in (X, Y)}
ROWS = {slot: buffer.strides[0] for slot, buffer in BUFFERS.items()}


def bound(layout: np.dtype[np.void], **fields: Field) -> dict[str, int]:
    step = Step(None, layout, (), (), fields)
    bind(step, BUFFERS)
    return dict(zip(layout.names, step.params[0].tolist(), strict=True))


def address(slot: Slot) -> int:
    return BUFFERS[slot].ctypes.data


def test_slots_are_addresses() -> None:
    layout = record("x", "columns", "n", f=np.float32)
    assert bound(layout, x=X, columns=X.columns(5), n=7, f=0.5) == {
        "x": address(X), "columns": address(X) + 20, "n": 7, "f": 0.5,
    }  # fmt: skip


def test_several_slots_are_an_array_of_addresses() -> None:
    step = Step(None, record("all", "stride"), (), (), {"all": [Y, X]})
    (kept,) = bind(step, BUFFERS)
    assert kept.tolist() == [address(Y), address(X)]
    assert step.params[0].tolist() == (kept.ctypes.data, ROWS[Y])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Y, ROWS[Y]),
        (X.columns(3), ROWS[X]),
        ([Y, X], ROWS[Y]),
        (np.zeros((2, 6), np.float32), 24),
        (np.zeros(6, np.float32), 0),
        (None, 0),
    ],
)
def test_strides_follow_from_what_a_field_is(value: Field, expected: int) -> None:
    assert bound(record("x", "x_stride"), x=value)["x_stride"] == expected


def test_stride_is_that_of_the_first_slot_of_the_record() -> None:
    layout = record("vector", "y", "x", "stride")
    assert bound(layout, x=X, y=Y, vector=np.zeros((2, 2), np.float32))["stride"] == ROWS[Y]
    assert bound(layout, x=X, y=Y, vector=None)["stride"] == ROWS[Y]


def test_a_given_stride_counts() -> None:
    assert bound(record("x", "x_stride"), x=X, x_stride=0)["x_stride"] == 0


def test_nothing_to_take_a_stride_of() -> None:
    with pytest.raises(PluginError, match="parameters of a step are missing: stride, y_stride"):
        bound(record("n", "stride", "y_stride"), n=1)
