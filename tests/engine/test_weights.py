"""Weights that are NaN, infinite or too large; rows of partial blocks."""

import numpy as np
import pytest

import gguf
import gguf_builder
import tiny_llama
from gguf import GGMLQuantizationType as Type
from llamacli import InvalidRequestError, ModelFormatError, load_model
from llamacli.gguf import open_gguf
from llamacli.quantization import TensorType, block_size, type_size
from llamacli.testing import models
from oracle.goldens import nmse
from suite import slow_but

MATRIX = "blk.1.ffn_up.weight"
QUICK = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]
SLOW = ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q1_0", "IQ1_S", "IQ2_XS", "IQ3_S", "TQ1_0"]
SCALE = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52}
"""Offset of the float16 scale in a block, if it is not 0."""

BITS = {"nan": 0x7E00, "inf": 0x7C00, "-inf": 0xFC00}


def spoiled(path, tmp_path, kind: str, number: str, name: str = MATRIX):
    """Copy a model with a number or scale that is not finite."""
    data = bytearray(path.read_bytes())
    with open_gguf(path) as file:
        info = file.tensors[name]
    if kind in ("F32", "F16", "BF16"):
        size = {"F32": 4, "F16": 2, "BF16": 2}[kind]
        at = info.offset + info.n_bytes // 2 // size * size
        bits = np.array(float(number), np.float32).view(np.uint32)
        raw = {"F32": bits, "F16": np.uint16(BITS[number]), "BF16": np.uint16(bits >> 16)}[kind]
    else:
        size = gguf.GGML_QUANT_SIZES[Type[kind]][1]
        at = info.offset + info.n_bytes // 2 // size * size + SCALE.get(kind, 0)
        raw = np.uint16(BITS[number])
    data[at : at + raw.nbytes] = raw.tobytes()
    (copy := tmp_path / "spoiled.gguf").write_bytes(data)
    return copy


@pytest.mark.parametrize("number", BITS)
@pytest.mark.parametrize("kind", slow_but(QUICK, QUICK + SLOW))
def test_weights_that_are_not_finite_are_refused(kind, number, tiny_gguf, plugins, engine, tmp_path) -> None:
    wide = {"n_embd": 256, "n_ff": 512} if gguf.GGML_QUANT_SIZES[Type[kind]][0] > 32 else {}
    path = tiny_gguf("gqa", type=kind, **wide)
    broken = spoiled(path, tmp_path, kind, number)
    for mode in ("auto", "fp32", "q8") if number == "nan" else ("auto",):
        with pytest.raises(ModelFormatError, match=rf"spoiled\.gguf: tensor '{MATRIX}' has weights that are NaN"):
            load_model(broken, mode, plugins=plugins, engine=engine)


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.0.attn_q.bias", "token_embd.weight"])
def test_each_kind_of_tensor_is_checked(name, tiny_gguf, plugins, engine, tmp_path) -> None:
    path = spoiled(tiny_gguf("biases"), tmp_path, "F32", "nan", name)
    with pytest.raises(ModelFormatError, match=f"tensor '{name}' has weights that are NaN"):
        load_model(path, plugins=plugins, engine=engine)


def test_weights_too_large_for_a_mode_are_refused(load_tiny, tiny_gguf) -> None:
    large = {MATRIX: np.full((96, 64), 1e9)}
    load_tiny(tensors=large)
    with pytest.raises(ModelFormatError, match=f"tensor '{MATRIX}' has weights that are NaN, infinite or too large"):
        load_tiny(mode="q8", tensors=large)


def test_logits_that_are_not_finite_are_not_sampled(load_tiny) -> None:
    """Products of finite weights may overflow."""
    huge = np.full((96, 64), 3e38)
    model = load_tiny(tensors={"blk.0.ffn_up.weight": huge, "blk.0.ffn_gate.weight": huge})
    with model.create_session() as session, np.errstate(all="ignore"):
        session.eval([1, 2, 3])
        assert not np.isfinite(session.logits).all()
        with pytest.raises(InvalidRequestError, match="logit"):
            session.sample()


def quantized_as_q2_0(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(-1, 64)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 1.5).astype("<f2")
    codes = (np.clip(np.rint(groups / scales), -1, 2) + 1).astype(np.uint8).reshape(-1, 16, 4)
    pairs = (codes << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
    return np.hstack([scales.view(np.uint8), pairs]).reshape(*x.shape[:-1], -1)


def quantized_as_q8_k(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(-1, 256)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype("<f4")
    codes = np.rint(groups / scales).astype(np.int8)
    sums = codes.reshape(-1, 16, 16).sum(axis=-1, dtype="<i2")
    return np.hstack([part.view(np.uint8) for part in (scales, codes, sums)]).reshape(*x.shape[:-1], -1)


def as_int8(x: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(40 * x), -128, 127).astype(np.int8).view(np.uint8)


WRITERS = {TensorType.Q2_0: quantized_as_q2_0, TensorType.Q8_K: quantized_as_q8_k, TensorType.I8: as_int8}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS, ids=lambda kind: kind.name)
def test_types_that_no_golden_has(kind, plugins, tmp_path, monkeypatch, caplog) -> None:
    """Types that llama.cpp cannot multiply, or `gguf` cannot write."""
    random_tensor = models.random_tensor

    def stored(seed: str, name: str, shape: tuple[int, ...], matrix_type: str):
        array, plain = random_tensor(seed, name, shape, matrix_type)
        return (WRITERS[kind](array), kind) if array.ndim == 2 else (array, plain)

    monkeypatch.setattr(models, "random_tensor", stored)
    monkeypatch.setitem(gguf.GGML_QUANT_SIZES, kind, (block_size(kind), type_size(kind)))
    path = tiny_llama.write_llama(tmp_path / "model.gguf", n_embd=256, n_ff=256)
    found = {}
    for mode in ("auto", "fp32"):
        with load_model(path, mode, plugins=plugins) as model, model.create_session() as session:
            found[mode] = session.eval([1, 5, 9, 100, 77, 3], all_logits=True)
    error = nmse(found["fp32"], found["auto"])
    assert error <= (1e-6 if kind is TensorType.I8 else 5e-3)  # auto keeps keys and values in float16
    assert ("no kernel of its own" in caplog.text) == (kind is TensorType.I8)


@pytest.mark.parametrize(("kind", "block"), [("Q8_0", 32), ("Q4_K", 256), ("IQ4_NL", 32), ("MXFP4", 32)])
def test_rows_of_partial_blocks_are_refused(kind, block, tmp_path) -> None:
    tensor = gguf_builder.Tensor("blk.0.attn_q.weight", (block + 8, 2), Type[kind], data=bytes(1000))
    (path := tmp_path / "odd.gguf").write_bytes(gguf_builder.gguf_bytes([], [tensor]))
    message = rf"odd\.gguf.*'blk\.0\.attn_q\.weight'.*rows of {block + 8} numbers are not a multiple of {kind}'s block"
    with pytest.raises(ModelFormatError, match=message):
        load_model(path)
