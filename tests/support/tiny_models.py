"""Tiny random models as GGUF files: two layers, every number decided by a seed and the tensor's name.

Needs nothing but NumPy and `gguf`, so that the scripts that record goldens can run where the reference does. The frozen
generator `RandomState` is used on purpose: its numbers never change from one NumPy to the next.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import gguf
from gguf import GGMLQuantizationType as Type

SIGMA = 0.1
"""Standard deviation of the weights."""

UNKNOWN, CONTROL, NORMAL, BYTE = 2, 3, 1, 6
"""GGUF's token types."""

SPACE = "\u2581"
WORDS = (
    "once", "upon", "a", "time", "there", "was", "little", "girl", "dog", "the", "and", "she", "saw", "big", "ball",
)  # fmt: skip


def spm_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a small SentencePiece vocabulary: bytes, letters, and words built letter by letter.

    Ids 0, 1 and 2 are unknown, BOS and EOS; the bytes follow. Better scores are merged first.
    """
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'\"-"]
    merged = dict.fromkeys(f"{SPACE}{word}"[:n] for word in WORDS for n in range(2, len(word) + 2))
    specials, spelled_bytes = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*merged, *letters]
    tokens = specials + spelled_bytes + pieces
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    return tokens, scores, types


def write_llama(
    path: str | Path,
    *,
    tokenizer: str = "test",
    seed: str = "llama",
    type: str = "F32",  # noqa: A002 - GGUF's word
    dequantized: bool = False,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int | None = None,
    head_dim: int | None = None,
    n_ff: int = 96,
    context_length: int = 256,
    tied: bool = False,
    biases: bool = False,
    rope_freqs: bool = False,
    n_expert: int = 0,
    n_expert_used: int = 0,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Collection[str] = (),
) -> Path:
    """Write a model of the llama architecture and return its path.

    `tokenizer` is "test" (128 tokens without text) or "spm" (`spm_vocabulary`). `type` is the matrices' tensor type;
    K-quants need widths that are multiples of 256; `dequantized` stores the same numbers as float32. `head_dim` writes
    `key_length` and `value_length`. The rest is as in `write_model`.
    """
    n_vocab, n_head_kv = len(vocabulary(tokenizer)[0]), n_head_kv or n_head
    width = head_dim or n_embd // n_head
    keys: dict[str, Any] = {
        "llama.context_length": context_length,
        "llama.embedding_length": n_embd,
        "llama.block_count": n_layer,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": n_head,
        "llama.attention.head_count_kv": n_head_kv,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": width,
    }
    if head_dim is not None:
        keys |= {"llama.attention.key_length": head_dim, "llama.attention.value_length": head_dim}
    if n_expert:
        keys |= {"llama.expert_count": n_expert, "llama.expert_used_count": n_expert_used}

    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    if rope_freqs:
        shapes["rope_freqs.weight"] = (width // 2,)
    experts = (n_expert,) if n_expert else ()
    suffix = "_exps" if n_expert else ""
    for i in range(n_layer):
        matrices = {
            "attn_q": (n_head * width, n_embd),
            "attn_k": (n_head_kv * width, n_embd),
            "attn_v": (n_head_kv * width, n_embd),
            "attn_output": (n_embd, n_head * width),
            f"ffn_gate{suffix}": (*experts, n_ff, n_embd),
            f"ffn_up{suffix}": (*experts, n_ff, n_embd),
            f"ffn_down{suffix}": (*experts, n_embd, n_ff),
        }
        for name, shape in matrices.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
            if biases:
                shapes[f"blk.{i}.{name}.bias"] = shape[:1]
        if n_expert:
            shapes[f"blk.{i}.ffn_gate_inp.weight"] = (n_expert, n_embd)
        shapes[f"blk.{i}.attn_norm.weight"] = shapes[f"blk.{i}.ffn_norm.weight"] = (n_embd,)

    return write_model(
        path,
        "llama",
        keys,
        shapes,
        tokenizer=tokenizer,
        seed=seed,
        type=type,
        dequantized=dequantized,
        metadata=metadata,
        tensors=tensors,
        without=without,
    )


def vocabulary(tokenizer: str) -> tuple[list[str], list[float], list[int] | None]:
    """Tokens, scores and types: "test" is 128 tokens without text, "spm" `spm_vocabulary`."""
    return spm_vocabulary() if tokenizer == "spm" else ([f"tok_{i}" for i in range(128)], [0.0] * 128, None)


def write_model(
    path: str | Path,
    architecture: str,
    keys: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    tokenizer: str = "test",
    seed: str,
    type: str = "F32",  # noqa: A002 - GGUF's word
    expert_type: str | None = None,
    dequantized: bool = False,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Collection[str] = (),
) -> Path:
    """Write a model with a vocabulary, these keys, and random tensors of these shapes; return its path.

    `type` is the matrices' tensor type, `expert_type` that of the experts' if it is another; `dequantized` stores the
    same numbers as float32. To make broken files:
    `metadata` are keys to add or, with None, to leave out; `tensors` are float32 arrays to add or to put in another's
    place; `without` are names of tensors to leave out.
    """
    tokens, scores, types = vocabulary(tokenizer)
    common: dict[str, Any] = {
        "general.name": f"tiny {seed}",
        f"{architecture}.vocab_size": len(tokens),
        "tokenizer.ggml.model": "llama" if tokenizer == "spm" else tokenizer,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    }
    content = {
        name: random_tensor(seed, name, shape, (expert_type or type) if "_exps." in name else type)
        for name, shape in shapes.items()
    }
    if dequantized:
        content = {name: (gguf.quants.dequantize(*tensor), Type.F32) for name, tensor in content.items()}
    content |= {name: (array.astype(np.float32), Type.F32) for name, array in (tensors or {}).items()}
    content = {name: tensor for name, tensor in content.items() if name not in without}
    write_gguf(path, architecture, common | dict(keys) | dict(metadata or {}), content)
    return Path(path)


def random_tensor(seed: str, name: str, shape: tuple[int, ...], matrix_type: str) -> tuple[np.ndarray, Type]:
    """A tensor as it is stored, and its type: matrices in `matrix_type`; all else, and routers, in float32."""
    random = np.random.RandomState(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little"))
    if name == "rope_freqs.weight":  # as Llama 3 has them: fast pairs as they are, slow ones 8 times slower
        return np.clip(np.linspace(-2, 10, shape[0]), 1, 8).astype(np.float32), Type.F32
    if name.endswith("norm.weight"):
        return (1 + SIGMA * random.standard_normal(shape)).astype(np.float32), Type.F32
    if len(shape) == 1 or "ffn_gate_inp" in name or not name.endswith(".weight"):
        return (SIGMA * random.standard_normal(shape)).astype(np.float32), Type.F32
    stored = Type[matrix_type]
    if stored is Type.MXFP4:
        return _random_mxfp4(random, shape), stored
    if stored in _SCALES:
        return _random_blocks(random, shape, stored), stored
    return gguf.quants.quantize((SIGMA * random.standard_normal(shape)).astype(np.float32), stored), stored


_SCALES: dict[Type, tuple[int, int | None, float]] = {
    Type.Q2_K: (80, 82, 1.5),
    Type.Q3_K: (108, None, 0),
    Type.Q4_K: (0, 2, 7.5),
    Type.Q5_K: (0, 2, 15.5),
    Type.Q6_K: (208, None, 0),
}
"""The K-quants, which `gguf` cannot write: where in a block the float16 scale and minimum stand, and the quotient of
the two that leaves weights with a mean near 0."""


def _random_blocks(random: np.random.RandomState, shape: tuple[int, ...], stored: Type) -> np.ndarray:
    """Blocks of random bits with one scale, so that the weights come out with deviation SIGMA."""
    block_size, type_size = gguf.GGML_QUANT_SIZES[stored]
    rows = (*shape[:-1], shape[-1] // block_size)
    blocks = random.randint(0, 256, (*rows, type_size)).astype(np.uint8)
    at, at_minimum, quotient = _SCALES[stored]

    def set_scale(scale: float) -> np.ndarray:
        for offset, value in ((at, scale), (at_minimum, scale * quotient)):
            if offset is not None:
                blocks[..., offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        return blocks.reshape(*shape[:-1], -1)

    return set_scale(SIGMA / float(gguf.quants.dequantize(set_scale(1), stored).std()))


def _random_mxfp4(random: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of random bits whose scales come out around SIGMA, but for some of the smallest that there are."""
    blocks = random.randint(0, 256, (*shape[:-1], shape[-1] // 32, 17)).astype(np.uint8)
    blocks[..., 0] = random.choice([0, 1, 119, 120, 121, 122, 123], blocks.shape[:-1])
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: str | Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, Type]]
) -> None:
    """Write a GGUF file. The types of keys follow from their values; those that are None are left out."""
    writer = gguf.GGUFWriter(path, architecture)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        if value is not None:
            add[type(value)](key, value)
    for name, (array, stored) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


LLAMA: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"n_head_kv": 2},
    "mqa": {"n_head_kv": 1},
    "tied": {"n_head_kv": 2, "tied": True},
    "biases": {"n_head_kv": 2, "biases": True},
    "rope_base": {"metadata": {"llama.rope.freq_base": 500000.0}},
    "rope_freqs": {"rope_freqs": True},
    "rope_linear": {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
    "rope_yarn": {
        "metadata": {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
        }
    },
    "head_dim": {"n_head_kv": 2, "head_dim": 32},
    "moe_8_2": {"n_head_kv": 2, "n_ff": 64, "n_expert": 8, "n_expert_used": 2},
    "moe_4_1": {"n_head_kv": 2, "n_ff": 64, "n_expert": 4, "n_expert_used": 1},
    "scales": {
        "n_head_kv": 2,
        "biases": True,
        "tensors": {
            f"blk.{i}.{name}.scale": np.array([0.5 + 0.1 * n + 0.3 * i])
            for i in range(2)
            for n, name in enumerate(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"))
        },
    },
    "f16": {"n_head_kv": 2, "type": "F16"},
    "bf16": {"n_head_kv": 2, "type": "BF16"},
    "q8_0": {"n_head_kv": 2, "type": "Q8_0"},
    "q4_0": {"n_head_kv": 2, "type": "Q4_0"},
    "q4_1": {"n_head_kv": 2, "type": "Q4_1"},
    "q5_0": {"n_head_kv": 2, "type": "Q5_0"},
    "q5_1": {"n_head_kv": 2, "type": "Q5_1"},
    "moe_q8_0": {"n_head_kv": 2, "n_ff": 64, "n_expert": 8, "n_expert_used": 2, "type": "Q8_0"},
    **{
        kind.lower(): {"n_embd": 256, "n_head_kv": 2, "n_ff": 512, "type": kind}
        for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
    },
}
"""Options of `write_llama` by the variant's name. All share one seed, so variants differ by what they are named for."""
