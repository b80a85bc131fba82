"""BitNet b1.58 2B4T: the tensor type I2_S, squared ReLUs."""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import InvalidRequestError, ModelFormatError, load_model
from llamacli.conversion import unchanged, write
from llamacli.gguf import GGUFFile
from llamacli.model import open_model_file
from llamacli.plugins import installed_plugins
from llamacli.testing import formulas, write_architecture
from llamacli_llama.bitnet import BitNet158
from llamacli_llama.i2_s import Added, dequantize
from oracle.goldens import TOKENS

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
KEYS = {"embedding_length": 128, "feed_forward_length": 256, "attention.head_count": 4, "attention.head_count_kv": 4}


def opened(path: Path) -> GGUFFile:
    """File whose tensor types may be plugins'."""
    file = open_model_file(path, installed_plugins().loaders())
    assert isinstance(file, GGUFFile)
    return file


def encode(codes: np.ndarray, scale: float) -> bytes:
    """Bytes of a matrix of -1, 0 and 1, weight by weight."""
    out, flat = np.zeros(codes.size // 4, np.uint8), codes.ravel() + 1
    for i, code in enumerate(flat.tolist()):
        block, place = divmod(i, 128)
        out[32 * block + place % 32] |= code << (6 - 2 * (place // 32))
    return out.tobytes() + struct.pack("<f", scale).ljust(32, b"\0")


def write_pair(folder: Path, cut: int = 0) -> tuple[Path, Path]:
    """Write a model in I2_S, and the same numbers in F32."""
    plain, packed = folder / "f32.gguf", folder / "i2_s.gguf"
    write_architecture(plain, architecture=BitNet158(), keys=KEYS, optional=False)
    random, tensors = np.random.RandomState(7), {}
    with opened(plain) as file:
        infos, parts, offset = b"", b"", 0
        for name, info in file.tensors.items():
            kind, data = 0, file.data(name).tobytes()
            if name.endswith(".weight") and name.split(".")[-2] in MATRICES:
                codes, scale = random.randint(-1, 2, info.shape), random.uniform(0.03, 0.1)
                tensors[name] = (codes * np.float32(scale)).astype(np.float32)
                kind, data = Added.I2_S, encode(codes, scale)
            infos += struct.pack("<Q", len(name)) + name.encode()
            infos += struct.pack(f"<I{len(info.shape)}QIQ", len(info.shape), *info.shape[::-1], kind, offset)
            parts += data.ljust(math.ceil(len(data) / 32) * 32, b"\0")
            offset = len(parts)
        pairs = b"".join(file.pair(key) for key in file.metadata)
        header = struct.pack("<4sIQQ", b"GGUF", 3, len(file.tensors), len(file.metadata)) + pairs + infos
    packed.write_bytes((header.ljust(math.ceil(len(header) / 32) * 32, b"\0") + parts)[: -cut or None])
    write_architecture(plain, architecture=BitNet158(), keys=KEYS, optional=False, tensors=tensors)
    return packed, plain


@pytest.mark.slow
def test_i2_s_has_the_numbers_and_the_results_of_float32(tmp_path: Path) -> None:
    packed, plain = write_pair(tmp_path)
    with opened(packed) as one, opened(plain) as other:
        name = "blk.1.ffn_down.weight"
        scale = one.data("blk.1.ffn_down.scale").view(np.float32)
        expected = other.data(name).view(np.float32)
        np.testing.assert_array_equal(dequantize(one.data(name)) * scale, expected)
    tokens, found = TOKENS[:12].tolist(), dict[str, Any]()
    for path, mode in ((packed, "fp32"), (packed, "auto"), (plain, "fp32")):
        with load_model(path, mode, plugins=installed_plugins()) as model:
            found[f"{path.stem} {mode}"] = model.logits(tokens)
    assert formulas.nmse(found["i2_s fp32"], found["f32 fp32"]) < 1e-11
    assert formulas.nmse(found["i2_s auto"], found["f32 fp32"]) < 1e-2


def test_a_scale_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    packed, _ = write_pair(tmp_path, cut=40)
    with pytest.raises(ModelFormatError, match=r"is it truncated\?"):
        load_model(packed)


def test_files_with_i2_s_are_not_copied(tmp_path: Path) -> None:
    packed, _ = write_pair(tmp_path)
    with opened(packed) as file, pytest.raises(InvalidRequestError, match="tensors of type I2_S cannot be written"):
        write(unchanged(file, None), tmp_path / "copy.gguf")
