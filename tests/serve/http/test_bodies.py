import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.bodies import MAX_DEPTH, convert, parse
from llamacli.serve.http.schemas.chat import ChatRequest


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"\xef\xbb\xbf{}", b'{"a": NaN}', b'{"a": "\xff"}', b"{} x", b'{"a": 1e999}',
        b'{"\\ud800": 1}', b'{"a": {"\\udfff": 1}}', b'{"a": "\\ud800"', b'{"\\ud800x": NaN}',
        b'{"a":' * 101 + b"1" + b"}" * 101, b'{"a":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_bodies_that_are_not_json_objects(data: bytes) -> None:
    with pytest.raises(BadRequestError) as error:
        parse(data)
    assert (error.value.status, error.value.code) == (400, "invalid_json")


def test_lone_surrogates_in_values_are_replaced() -> None:
    assert parse(b'{"a": ["x\\ud83d", {"b": "\\ud83d\\ude00"}]}') == {"a": ["x\ufffd", {"b": "\U0001f600"}]}


def test_nesting_up_to_the_limit() -> None:
    body = b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH
    assert parse(body) == json.loads(body)


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers(-(2**63), 2**63) | st.text(), st.lists)))
def test_objects_are_parsed_as_json(value: dict) -> None:
    assert parse(json.dumps(value).encode()) == value


MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [MESSAGE, {"role": 1}]}, "messages[1].role", "invalid_type"),
        ({"messages": [MESSAGE], "temperature": -1}, "temperature", "invalid_value"),
        ({"messages": [MESSAGE], "temperature": "hot"}, "temperature", "invalid_type"),
        ({"messages": [MESSAGE], "n": 17}, "n", "invalid_value"),
        ({"messages": [MESSAGE], "n": True}, "n", "invalid_type"),
        ({"messages": [MESSAGE], "stop": [""]}, "stop[0]", "invalid_value"),
        ({"messages": [MESSAGE], "tools": [{"function": {}}]}, "tools[0].function.name", "missing_required_parameter"),
        ({"messages": [MESSAGE], "max_tokens": -2}, "max_tokens", "invalid_value"),
        ({"messages": [MESSAGE], "seed": 2**63}, "seed", "invalid_value"),
        ({"messages": [MESSAGE], "logit_bias": {"1": 101}}, "logit_bias[...]", "invalid_value"),
    ],
)
def test_errors_name_the_field(fields: dict, param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as error:
        convert(fields, ChatRequest)
    assert (error.value.param, error.value.code) == (param, code)
    assert str(error.value).startswith(param)
    assert "`str`" not in str(error.value)


def test_errors_say_what_is_expected() -> None:
    for data, kind, name in ((b"[]", dict, "object"), (b"{}", list, "array")):
        with pytest.raises(BadRequestError, match=f"^the body is not a JSON {name}$"):
            parse(data, kind)
    with pytest.raises(BadRequestError, match=r"^max_tokens: expected `integer \| null`, got `string`$"):
        convert({"messages": [MESSAGE], "max_tokens": "x"}, ChatRequest)


def test_null_counts_as_absent() -> None:
    assert convert({"messages": [MESSAGE], "temperature": None}, ChatRequest).temperature is None


SCRIPT = """
import mmap, resource
from llamacli.serve.http.bodies import parse
data = b'{"prompt": "' + b"a b" * 3_000_000 + b'"}'
used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
for spare in (2, 4, 6, 8):
    resource.setrlimit(resource.RLIMIT_AS, (used + (spare << 20), resource.RLIM_INFINITY))
    try:
        parse(data)
    except MemoryError:
        print("MemoryError")
"""


@pytest.mark.slow
def test_large_bodies_without_room_are_a_memory_error() -> None:
    """The decoder of msgspec 0.22 ends the process there (SIGSEGV)."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "MemoryError\n" * 4), done.stderr
