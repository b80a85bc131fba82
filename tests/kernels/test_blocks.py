"""Arguments of compiled functions of arrays."""

from typing import Any

import numpy as np
import pytest

from llamacli.kernels.jit import array_function

TABLE = "Tuple((uint8[::1], int64[:, ::1]))"


@array_function(f"float64(float32[::1], {TABLE}, int64, boolean, float32, boolean[::1], float64)")
def weighed(x: Any, table: Any, n: Any, doubled: Any, factor: Any, mask: Any, offset: Any) -> Any:
    data, slots = table
    total = offset + slots[1, 2] + slots.shape[0] + data[0] + len(data)
    for i in range(n):
        if mask[i]:
            total += x[i] * factor
    return 2 * total if doubled else total


@array_function("void(int32[::1], uint32[::1], int16[::1])")
def increase(a: Any, b: Any, c: Any) -> None:
    a += np.int32(1)
    b += np.uint32(2)
    c += np.int16(3)


@array_function("float32(float32[::1])")
def first(x: Any) -> Any:
    return x[0]


def arguments() -> list[Any]:
    table = np.array([3, 4], np.uint8), np.arange(6).reshape(2, 3)
    return [np.arange(5, dtype=np.float32), table, 4, True, np.float32(0.5), np.array([1, 0, 1, 1], np.bool_), 0.25]


def test_arrays_tuples_and_numbers_are_passed() -> None:
    expected = 2 * (0.25 + 5 + 2 + 3 + 2 + 0.5 * (0 + 2 + 3))
    assert weighed(*arguments()) == expected
    changed = arguments()
    changed[3] = np.bool_(False)
    assert weighed(*changed) == expected / 2


def test_arrays_are_written_in_place() -> None:
    arrays = [np.zeros(3, kind) for kind in (np.int32, np.uint32, np.int16)]
    assert increase(*arrays) is None
    assert [array.tolist() for array in arrays] == [[1] * 3, [2] * 3, [3] * 3]


def test_float32_result() -> None:
    assert first(np.array([0.1], np.float32)) == float(np.float32(0.1))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, np.arange(5.0)), (0, np.arange(10, dtype=np.float32)[::2]), (0, np.zeros((2, 2), np.float32)), (0, [1.0]),
        (0, np.frombuffer(bytes(8), np.float32)), (1, (np.zeros(2, np.uint8),)), (2, 1.5), (6, "x"),
    ],
    ids=["type", "stride", "axes", "list", "read-only", "tuple", "integer", "number"],
)  # fmt: skip
def test_other_types_are_refused(place: int, value: Any) -> None:
    given = arguments()
    given[place] = value
    with pytest.raises((TypeError, ValueError)):
        weighed(*given)


def test_missing_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        weighed(*arguments()[:-1])
