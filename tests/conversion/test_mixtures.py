"""Types of tensors in mixtures, compared with llama.cpp's."""

import json
from typing import Any

import pytest

import gguf
from llamacli.conversion import FILE_TYPE_NAMES, FILE_TYPES, file_type
from llamacli.conversion.mixtures import ALIASES, choose
from llamacli.errors import InvalidRequestError
from llamacli.gguf import Metadata, TensorInfo
from llamacli.quantization import TensorType, nbytes
from oracle import mixtures, quantizers

GOLDEN: dict[str, dict[str, dict[str, str]]] = json.loads(mixtures.GOLDEN.read_text())


def tensor_infos(shapes: dict[str, tuple[int, ...]]) -> list[TensorInfo]:
    return [
        TensorInfo(f"{name}.weight", shape, TensorType.F32, nbytes(TensorType.F32, shape))
        for name, shape in shapes.items()
    ]


def metadata_of(keys: dict[str, int]) -> Metadata:
    values: dict[str, Any] = {"general.architecture": "toy"}
    return Metadata(values | {f"toy.{key}": value for key, value in ({"attention.head_count": 8} | keys).items()})


def chosen(case: str, name: str) -> dict[str, str]:
    """Our choices in the format of the golden file."""
    shapes, keys = mixtures.CASES[case]
    infos = tensor_infos(shapes)
    kind, *options = name.split()
    pure, has_imatrix = mixtures.PURE in options, mixtures.IMATRIX in options
    given: dict[str, Any] = {"pure": pure, "has_imatrix": has_imatrix, "overrides": mixtures.overrides_of(name)}
    choices = choose(infos, metadata_of(keys), file_type(kind), **given)
    types = {info.name: (choices[info.name].type if info.name in choices else info.type).name for info in infos}
    return mixtures.by_stem(types)


@pytest.mark.parametrize("case", mixtures.CASES)
def test_types_match_llama_cpp(case: str) -> None:
    recorded = {name.split()[0] for name in GOLDEN[case]}
    assert recorded | {"NVFP4"} == {*FILE_TYPES, *ALIASES}  # llama.cpp writes no NVFP4
    for name, expected in GOLDEN[case].items():
        assert chosen(case, name) == expected, name


def test_overrides_were_recorded() -> None:
    assert {name for recorded in GOLDEN.values() for name in recorded if "=" in name} == set(mixtures.OVERRIDDEN)


def test_overrides_apply_without_a_mixture() -> None:
    shapes, keys = mixtures.CASES["grouped heads"]
    overrides = [("attn_q", TensorType.Q8_0), ("ATTN_", TensorType.BF16)]
    choices = choose(tensor_infos(shapes), metadata_of(keys), file_type("F16"), overrides=overrides)
    found = {name.split(".")[-2]: choice.type for name, choice in choices.items()}
    assert (found["attn_q"], found["attn_k"], found["ffn_up"]) == (TensorType.Q8_0, TensorType.BF16, TensorType.F16)


@pytest.mark.parametrize(("pattern", "text"), [("(", "no regex"), ("attn_x", "in no name")])
def test_wrong_overrides_are_named(pattern: str, text: str) -> None:
    shapes, keys = mixtures.CASES["grouped heads"]
    with pytest.raises(InvalidRequestError, match=text):
        choose(tensor_infos(shapes), metadata_of(keys), file_type("Q4_K_M"), overrides=[(pattern, TensorType.Q8_0)])


def test_independent_of_tensor_order() -> None:
    shapes, keys = mixtures.CASES["grouped heads"]
    infos = tensor_infos(shapes)
    kind = file_type("Q4_K_M")
    assert choose(infos, metadata_of(keys), kind) == choose(infos[::-1], metadata_of(keys), kind)


def test_file_type_numbers_match_llama_cpp() -> None:
    for name in (*FILE_TYPES, *ALIASES):
        assert file_type(name).number == quantizers.FILE_TYPES[name]
        assert file_type(name.lower()) is file_type(name)
    with pytest.raises(InvalidRequestError, match=r"unknown type 'Q9_0'.*Q4_K_M"):
        file_type("Q9_0")


def test_file_type_names_are_those_of_llama_cpp() -> None:
    for kind in set(gguf.LlamaFileType) - {gguf.LlamaFileType.GUESSED}:
        assert kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") == FILE_TYPE_NAMES[kind.value]
    for name, kind in FILE_TYPES.items():
        assert FILE_TYPE_NAMES[kind.number] == name


def test_file_without_hyperparameters() -> None:
    infos = tensor_infos({"blk.0.attn_v": (2, 256), "blk.0.ffn_down": (2, 256), "token_embd": (2, 256)})
    choices = choose(infos, Metadata({}), file_type("Q4_K_M"))
    assert {name: choice.type.name for name, choice in choices.items()} == {
        "token_embd.weight": "Q6_K",
        "blk.0.attn_v.weight": "Q6_K",
        "blk.0.ffn_down.weight": "Q6_K",
    }


def test_fallbacks_keep_the_wanted_type() -> None:
    infos = tensor_infos({"blk.0.attn_q": (2, 288), "blk.0.ffn_up": (2, 40), "blk.0.attn_k": (2, 512)})
    choices = choose(infos, Metadata({}), file_type("Q4_K_S"))
    found = {name: (choice.wanted.name, choice.type.name) for name, choice in choices.items()}
    assert found == {
        "blk.0.attn_q.weight": ("Q4_K", "Q5_0"),
        "blk.0.ffn_up.weight": ("Q4_K", "F16"),
        "blk.0.attn_k.weight": ("Q4_K", "Q4_K"),
    }
