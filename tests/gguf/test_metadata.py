"""Typed getters of GGUF metadata."""

from collections.abc import Callable

import numpy as np
import pytest

from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata

VALUES = {
    "int": 7,
    "negative": -1,
    "big": 2**64 - 1,
    "float": 0.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "bool": True,
    "str": "seven",
    "ints": np.array([1, 2, 3], np.uint32),
    "list": [4, 5, 6],
    "floats": np.array([1.0, 2.0, 3.0], np.float32),
    "bools": np.array([True, False, True]),
    "strings": ["1", "2", "3"],
    "matrix": np.zeros((3, 3), np.int32),
    "empty": np.array([], np.int32),
}
M = Metadata(VALUES, "tiny.gguf")


def test_is_a_mapping() -> None:
    assert dict(M) == VALUES
    assert len(M) == len(VALUES)
    assert "int" in M
    assert M.get("absent") is None
    with pytest.raises(KeyError):
        M["absent"]


def test_copies_its_dict() -> None:
    values = {"a": 1}
    metadata = Metadata(values)
    values["a"] = 2
    assert metadata["a"] == 1


def test_records_consumed_keys() -> None:
    metadata = Metadata(VALUES)
    assert "int" in metadata
    assert metadata.get_int("absent", 0) == 0
    assert list(metadata) == list(VALUES)
    assert metadata.consumed == set()
    metadata.get_int("int")
    metadata.get_ints("ints", 3)
    assert (metadata.peek("float"), metadata["str"]) == (VALUES["float"], "seven")
    assert metadata.consumed == {"int", "ints", "str"}


def test_values_of_the_right_type() -> None:
    assert M.get_int("int") == 7
    assert M.get_int("big") == 2**64 - 1
    assert M.get_float("float") == 0.5
    assert M.get_bool("bool") is True
    assert M.get_str("str") == "seven"
    assert M.get_ints("ints", 3) == (1, 2, 3)
    assert M.get_ints("list", 3) == (4, 5, 6)
    assert M.get_ints("int", 3) == (7, 7, 7)
    assert M.get_ints("empty", 0) == ()
    assert {type(i) for i in M.get_ints("ints", 3)} == {int}
    assert M.get_bools("bools", 3) == (True, False, True)
    assert M.get_floats("floats", 3) == M.get_floats("ints", 3) == (1.0, 2.0, 3.0)
    assert M.get_floats("float", 2) == (0.5, 0.5)
    assert {type(i) for i in M.get_floats("ints", 3)} == {float}


def test_an_integer_is_a_number() -> None:
    assert M.get_float("int") == 7.0
    assert type(M.get_float("int")) is float


GETTERS: dict[str, Callable[..., object]] = {
    "get_int": M.get_int,
    "get_float": M.get_float,
    "get_bool": M.get_bool,
    "get_str": M.get_str,
    "get_ints": lambda key, **kwargs: M.get_ints(key, 3, **kwargs),
}
REFUSED = {
    "get_int": {"float", "nan", "bool", "str", "ints", "list", "floats", "strings", "empty"},
    "get_float": {"nan", "inf", "bool", "str", "ints", "floats", "strings", "empty"},
    "get_bool": {"int", "float", "str", "bools", "strings"},
    "get_str": {"int", "float", "bool", "ints", "strings"},
    "get_ints": {"float", "nan", "bool", "str", "floats", "bools", "strings", "matrix", "empty"},
}


@pytest.mark.parametrize(("getter", "key"), [(getter, key) for getter, keys in REFUSED.items() for key in sorted(keys)])
def test_wrong_type_is_refused_with_or_without_default(getter: str, key: str) -> None:
    with pytest.raises(ModelFormatError, match=f"tiny.gguf: metadata key '{key}'"):
        GETTERS[getter](key)
    with pytest.raises(ModelFormatError, match=f"tiny.gguf: metadata key '{key}'"):
        GETTERS[getter](key, default=None)


@pytest.mark.parametrize("key", ["nan", "inf", "bool", "str", "bools", "strings", "matrix", "empty", "absent"])
def test_what_is_not_an_array_of_numbers_is_refused(key: str) -> None:
    with pytest.raises(ModelFormatError, match=f"tiny.gguf: metadata key '{key}'"):
        M.get_floats(key, 3)
    with pytest.raises(ModelFormatError, match="'floats' has 3 values, not 4"):
        M.get_floats("floats", 4)
    with pytest.raises(ModelFormatError, match=r"'floats' is 3\.0; at most 2"):
        M.get_floats("floats", 3, maximum=2)


@pytest.mark.parametrize("getter", GETTERS)
def test_missing_key(getter: str) -> None:
    with pytest.raises(ModelFormatError, match=r"tiny\.gguf: metadata key 'absent' is missing"):
        GETTERS[getter]("absent")
    assert GETTERS[getter]("absent", default=None) is None
    default = object()
    assert GETTERS[getter]("absent", default=default) is default


def test_range_is_inclusive_and_does_not_bind_the_default() -> None:
    assert M.get_int("int", minimum=7, maximum=7) == 7
    assert M.get_float("float", minimum=0.5, maximum=0.5) == 0.5
    assert M.get_ints("ints", 3, minimum=1, maximum=3) == (1, 2, 3)
    assert M.get_int("absent", 0, minimum=1) == 0
    with pytest.raises(ModelFormatError, match="'int' is 7; at least 8"):
        M.get_int("int", minimum=8)
    with pytest.raises(ModelFormatError, match="'int' is 7; at most 6"):
        M.get_int("int", maximum=6)
    with pytest.raises(ModelFormatError, match=r"'float' is 0\.5; at least 1"):
        M.get_float("float", minimum=1)
    with pytest.raises(ModelFormatError, match=r"'float' is 0\.5; at most 0"):
        M.get_float("float", maximum=0)
    with pytest.raises(ModelFormatError, match="'ints' is 1; at least 2"):
        M.get_ints("ints", 3, minimum=2)
    with pytest.raises(ModelFormatError, match="'negative' is -1; at least 0"):
        M.get_ints("negative", 3, minimum=0)


def test_length_of_an_array_must_fit() -> None:
    with pytest.raises(ModelFormatError, match="'ints' has 3 values, not 2"):
        M.get_ints("ints", 2)
    with pytest.raises(ModelFormatError, match="'bools' has 3 values, not 2"):
        M.get_bools("bools", 2)


@pytest.mark.parametrize("key", ["int", "bool", "ints", "strings", "absent"])
def test_booleans_are_not_integers(key: str) -> None:
    with pytest.raises(ModelFormatError, match=f"tiny.gguf: metadata key '{key}'"):
        M.get_bools(key, 2)


def test_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ModelFormatError) as caught:
        Metadata({"a": "x" * 10000}).get_int("a")
    assert len(str(caught.value)) < 200
