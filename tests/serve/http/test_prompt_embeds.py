"""Prompts of embeddings: forms that are read, errors by field."""

import base64
import io
import json

import numpy as np
import pytest

from llamacli.inputs import Inputs
from llamacli.quantization.tensor_types import to_bf16

ROWS = np.random.default_rng(2).normal(0, 0.3, (5, 64)).astype(np.float32)


def npy(array: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def safetensors(array: np.ndarray, kind: str, metadata: bool = False, **changes: object) -> bytes:
    entry = {"dtype": kind, "shape": list(array.shape), "data_offsets": [0, array.nbytes]} | changes
    header = json.dumps(({"__metadata__": {"format": "np"}} if metadata else {}) | {"rows": entry}).encode()
    return len(header).to_bytes(8, "little") + header + array.tobytes()


def two_tensors() -> bytes:
    entry = {"dtype": "F32", "shape": [0, 64], "data_offsets": [0, 0]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    return len(header).to_bytes(8, "little") + header


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def width(fake) -> np.ndarray:
    return np.resize(ROWS, (5, fake._model.config.n_embd))


FORMS = {
    "npy": npy,
    "npy version 2": lambda x: npy(x, (2, 0)),
    "npy in Fortran's order": lambda x: npy(np.asfortranarray(x)),
    "npy of a batch": lambda x: npy(x[None]),
    "npy of float64": lambda x: npy(x.astype(np.float64)),
    "safetensors": lambda x: safetensors(x, "F32"),
    "safetensors with metadata": lambda x: safetensors(x, "F32", metadata=True),
    "safetensors of float64": lambda x: safetensors(x.astype(np.float64), "F64"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, http, fake) -> None:
    rows = width(fake)
    reply = http.send("/v1/completions", {"prompt_embeds": text(FORMS[form](rows))})
    assert reply.status == 200
    (sent,) = fake.requests
    expected = Inputs.of(embeddings=rows)
    assert sent.prompts == (tuple(expected.keys),)
    inputs = sent.contents.slice(list(sent.prompts[0]))
    np.testing.assert_array_equal(inputs.embeddings, rows)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", np.float16), ("BF16", np.uint16)])
def test_half_precision(kind: str, dtype: type, http, fake) -> None:
    rows = (np.arange(5 * fake._model.config.n_embd).reshape(5, -1) % 37 / 8).astype(np.float32)  # exact in both
    stored = to_bf16(rows) if kind == "BF16" else rows.astype(dtype)
    assert http.send("/v1/completions", {"prompt_embeds": text(safetensors(stored, kind))}).status == 200
    if kind == "F16":
        assert http.send("/v1/completions", {"prompt_embeds": text(npy(stored))}).status == 200
    assert {request.prompts for request in fake.requests} == {(tuple(Inputs.of(embeddings=rows).keys),)}


def test_embeddings_come_before_texts(http, fake) -> None:
    embeds = [text(npy(width(fake))), text(npy(2 * width(fake)))]
    body = {"prompt": ["a", [7, 8]], "prompt_embeds": embeds, "return_token_ids": True}
    choices = http.send("/v1/completions", body).json["choices"]
    prompts = fake.requests[0].prompts
    assert [len(prompt) for prompt in prompts] == [5, 5, len(prompts[2]), 2]
    assert [choice["prompt_token_ids"] for choice in choices] == [None, None, list(prompts[2]), [7, 8]]
    with http.openai() as client:  # OpenAI's client insists on a prompt
        made = client.completions.create(model="demo", prompt="", extra_body={"prompt_embeds": embeds[0]})
    assert [choice.text for choice in made.choices] == ["one two three"]
    assert len(fake.requests[1].prompts) == 1


BIG = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000000), }".ljust(117)
    + b"\n"
)

WRONG = {
    "not base64": ("§§", "it is not base64"),
    "no file": (text(b"hello, world"), "neither those of .npy nor of safetensors"),
    "torch.save": (text(b"PK\x03\x04" + bytes(40)), "a file of torch.save is a pickle, which is not read"),
    "pickle": (text(b"\x80\x04" + bytes(40)), "a file of torch.save is a pickle, which is not read"),
    "npy of objects": (text(npy(np.array([[None]]))), "type object; float16, float32 and float64 are read"),
    "npy of integers": (text(npy(np.zeros((2, 4), np.int32))), "type int32; float16"),
    "npy cut off": (text(npy(ROWS)[:-1]), r"its shape \(5, 64\) of float32 does not fit 1279 bytes"),
    "npy of a huge shape": (text(BIG), r"its shape \(1000000000, 1000000\) of float32 does not fit 0 bytes"),
    "npy without header": (text(b"\x93NUMPY\x01\x00\xff\xff{"), "its .npy header is wrong"),
    "npy version 9": (text(b"\x93NUMPY\x09\x00\x01\x00{"), "version 9.0 of the format is unknown"),
    "safetensors of integers": (text(safetensors(ROWS, "I32")), "'I32'; F64, F32, F16, BF16 are read"),
    "safetensors of another size": (text(safetensors(ROWS, "F32", shape=[5, 63])), r"its shape \(5, 63\) of float32"),
    "safetensors of offsets": (text(safetensors(ROWS, "F32", data_offsets=[4, 1280])), "offsets 4 and 1280"),
    "safetensors of a shape": (text(safetensors(ROWS, "F32", shape=[-5, -64])), r"shape \[-5, -64\]"),
    "safetensors without header": (text(b"\xff" * 8 + b"{"), "its safetensors header is wrong"),
    "safetensors of two": (text(two_tensors()), "it lists 2 tensors, expected one"),
    "another width": (text(npy(np.zeros((2, 7), np.float32))), "rows of 7 numbers, and the model has embeddings of"),
    "one dimension": (text(npy(np.zeros(8, np.float32))), r"embeddings have the shape \(8,\), expected \[m, n_embd\]"),
    "no rows": (text(npy(np.zeros((0, 64), np.float32))), "it has no rows"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_values_are_named(wrong: str, http, fake) -> None:
    value, message = WRONG[wrong]
    for given, place in ((value, "prompt_embeds: "), ([text(npy(width(fake))), value], "prompt_embeds[1]: ")):
        reply = http.send("/v1/completions", {"prompt_embeds": given})
        assert (reply.status, reply.json["error"]["param"]) == (400, "prompt_embeds")
        assert reply.json["error"]["message"].startswith(place)
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(reply.json["error"]["message"])
    assert fake.requests == []


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e300])
def test_numbers_must_be_finite(number: float, http, fake) -> None:
    rows = width(fake).astype(np.float64)
    rows[3, 1] = number
    reply = http.send("/v1/completions", {"prompt_embeds": text(npy(rows))})
    assert reply.status == 400
    assert "prompt_embeds: embeddings have numbers in row 3 that are NaN" in reply.json["error"]["message"]


@pytest.mark.parametrize("field", [{"echo": True}, {"suffix": "b"}, {"truncate_prompt_tokens": 3}], ids=str)
def test_fields_of_texts(field: dict, http, fake) -> None:
    reply = http.send("/v1/completions", {"prompt_embeds": text(npy(width(fake))), **field})
    (name,) = field
    assert (reply.status, reply.json["error"]["param"]) == (400, name)
    assert reply.json["error"]["message"] == f"{name}: it needs a prompt of text or token ids, not prompt_embeds"


def test_no_prompt_at_all(http) -> None:
    for path in ("/v1/completions", "/completion"):
        for body in ({}, {"prompt": None}, {"prompt_embeds": []}):
            reply = http.send(path, body)
            assert (reply.status, reply.json["error"]["code"]) == (400, "missing_required_parameter")
            assert reply.json["error"]["message"] == "prompt: it is required"


def test_llama_servers_form_has_none(http, fake) -> None:
    reply = http.send("/completion", {"prompt_embeds": text(npy(width(fake))), "prompt": "a"})
    assert (reply.status, reply.json["error"]["param"]) == (400, "prompt_embeds")
