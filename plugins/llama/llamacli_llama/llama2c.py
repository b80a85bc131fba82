"""Loader of llama2.c checkpoints, versions 0 and 2 (Karpathy 2023).

Version 0 is float32, version 2 is int8 with a float32 scale per group. Both become an `ArrayFile` with GGUF's keys and
tensor names. llama2.c rotates adjacent pairs, as GGUF's llama does, so rows of Q and K stay in their order. The
vocabulary is a separate file next to the checkpoint.
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.plugin import ArrayFile, Loader, Metadata, ModelFormatError, hookimpl

LLAMACLI_API = 1

_MAGIC = struct.pack("<I", 0x616B3432)
_V0 = struct.Struct("<7i")
_V2 = struct.Struct("<4si7iBi")
_V2_HEADER_BYTES = 256
_SIZES = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
_VOCAB_SIZE = _SIZES.index("vocab_size")
_MAX_TOKEN_BYTES = 1 << 16

_BLOCK_NORMS = ("attn_norm", "ffn_norm")
_BLOCK_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down", "ffn_up")
_PER_LAYER = frozenset((*_BLOCK_NORMS, *_BLOCK_MATRICES))
_ROPE_TABLES = "rope tables"
_V0_ORDER = (
    "token_embd",
    "attn_norm",
    *_BLOCK_MATRICES[:4],
    "ffn_norm",
    *_BLOCK_MATRICES[4:],
    "output_norm",
    _ROPE_TABLES,
)
_V2_ORDER = (*_BLOCK_NORMS, "output_norm", "token_embd", *_BLOCK_MATRICES)

_UNKNOWN, _CONTROL, _NORMAL, _BYTE = 2, 3, 1, 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@attrs.frozen(kw_only=True)
class Checkpoint:
    """Header of a checkpoint; `group_size` is 0 for float32 weights."""

    version: int
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    shared_classifier: bool
    group_size: int = 0

    @classmethod
    def parse(cls, head: bytes) -> "Checkpoint":
        """Parse a header. Raises ModelFormatError naming the invalid field."""
        if not head.startswith(_MAGIC):
            if len(head) < _V0.size:
                raise ModelFormatError(f"a header has {_V0.size} bytes, not {len(head)}")
            sizes = list(_V0.unpack_from(head))
            shared = int(sizes[_VOCAB_SIZE] > 0)  # negative vocab_size: the classifier is not shared
            sizes[_VOCAB_SIZE] = abs(sizes[_VOCAB_SIZE])
            return cls._checked(0, sizes, shared)
        if len(head) < _V2_HEADER_BYTES:
            raise ModelFormatError(f"a header has {_V2_HEADER_BYTES} bytes, not {len(head)}")
        _, version, *sizes, shared, group_size = _V2.unpack_from(head)
        if version != 2:
            raise ModelFormatError(f"version {version} is not supported (0 and 2 are)")
        if group_size < 1:
            raise ModelFormatError(f"group_size is {group_size}")
        checkpoint = cls._checked(version, sizes, shared, group_size)
        for name in ("token_embd", *_BLOCK_MATRICES):
            if math.prod(checkpoint.shape(name)) % group_size:
                raise ModelFormatError(f"group_size {group_size} does not divide {name} {checkpoint.shape(name)}")
        return checkpoint

    @classmethod
    def _checked(cls, version: int, sizes: list[int], shared: int, group_size: int = 0) -> "Checkpoint":
        """Create a checkpoint from fields, after checking their consistency."""
        for field, size in zip(_SIZES, sizes, strict=True):
            if size < 1:
                raise ModelFormatError(f"{field} is {size}")
        if shared > 1:
            raise ModelFormatError(f"shared_classifier is {shared}, not 0 or 1")
        named = dict(zip(_SIZES, sizes, strict=True))
        if named["dim"] % (2 * named["n_heads"]):
            raise ModelFormatError(f"dim {named['dim']} is not a multiple of 2 * n_heads = {2 * named['n_heads']}")
        if named["n_heads"] % named["n_kv_heads"]:
            raise ModelFormatError(f"n_heads {named['n_heads']} is not a multiple of n_kv_heads {named['n_kv_heads']}")
        return cls(version=version, **named, shared_classifier=bool(shared), group_size=group_size)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.dim // self.n_heads

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first; of one layer for per-layer tensors."""
        kv_dim = self.n_kv_heads * self.head_dim
        shapes = {
            "token_embd": (self.vocab_size, self.dim),
            "attn_q": (self.dim, self.dim),
            "attn_k": (kv_dim, self.dim),
            "attn_v": (kv_dim, self.dim),
            "attn_output": (self.dim, self.dim),
            "ffn_gate": (self.hidden_dim, self.dim),
            "ffn_down": (self.dim, self.hidden_dim),
            "ffn_up": (self.hidden_dim, self.dim),
            "output": (self.vocab_size, self.dim),
            _ROPE_TABLES: (2, self.seq_len, self.head_dim // 2),
        }
        return shapes.get(name, (self.dim,))

    def order(self) -> tuple[str, ...]:
        """Tensor names in file order; per-layer tensors are stored layer by layer."""
        return (_V2_ORDER if self.group_size else _V0_ORDER) + (() if self.shared_classifier else ("output",))

    def n_copies(self, name: str) -> int:
        """Number of tensors of this name: one per layer, or one."""
        return self.n_layers if name in _PER_LAYER else 1

    def n_bytes(self, name: str) -> int:
        """Bytes of one tensor."""
        n = math.prod(self.shape(name))
        return n + n // self.group_size * 4 if self.is_quantized(name) else n * 4

    def is_quantized(self, name: str) -> bool:
        """Test for a tensor stored as int8 with scales."""
        return self.group_size > 0 and not name.endswith("norm")

    @property
    def data_start(self) -> int:
        """Offset of the first tensor in the file."""
        return _V2_HEADER_BYTES if self.version else _V0.size

    @property
    def file_size(self) -> int:
        """File size in bytes that this header implies."""
        return self.data_start + sum(self.n_copies(name) * self.n_bytes(name) for name in self.order())

    def tensors(self, data: mmap.mmap) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """All tensors by their GGUF names; `data` is the whole file."""
        offset = self.data_start
        for name in self.order():
            for i in range(self.n_copies(name)):
                if name != _ROPE_TABLES:  # RoPE angles stored by old checkpoints, not needed
                    prefix = f"blk.{i}." if name in _PER_LAYER else ""
                    yield f"{prefix}{name}.weight", self._tensor(name, data, offset)
                offset += self.n_bytes(name)

    def _tensor(self, name: str, data: mmap.mmap, offset: int) -> npt.NDArray[np.float32]:
        n = math.prod(self.shape(name))
        if not self.is_quantized(name):
            return np.frombuffer(data, "<f4", n, offset).reshape(self.shape(name))
        groups = np.frombuffer(data, np.int8, n, offset).reshape(-1, self.group_size)
        scales = np.frombuffer(data, "<f4", len(groups), offset + n)
        with np.errstate(all="ignore"):  # weights out of range are found in the logits, as those of other files
            return (groups * scales[:, None]).reshape(self.shape(name))

    def metadata(self) -> dict[str, Any]:
        """Hyperparameters under GGUF's keys, llama2.c's constants included."""
        return {
            "general.architecture": "llama",
            "llama.vocab_size": self.vocab_size,
            "llama.context_length": self.seq_len,
            "llama.embedding_length": self.dim,
            "llama.block_count": self.n_layers,
            "llama.feed_forward_length": self.hidden_dim,
            "llama.attention.head_count": self.n_heads,
            "llama.attention.head_count_kv": self.n_kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": self.head_dim,
            "llama.rope.freq_base": 10000.0,
        }


def matches(path: Path) -> bool:
    """Test for a checkpoint by magic number or by exact file size."""
    try:
        with path.open("rb") as file:
            head = file.read(_V0.size)
            return head.startswith(_MAGIC) or Checkpoint.parse(head).file_size == os.fstat(file.fileno()).st_size
    except (OSError, ModelFormatError):
        return False


def open_checkpoint(path: Path) -> ArrayFile:
    """Read a checkpoint and the vocabulary next to it.

    Raises ModelFormatError naming the file and the field.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path}: cannot read the file: {error}") from error
    try:
        checkpoint = Checkpoint.parse(data[:_V2_HEADER_BYTES])
    except ModelFormatError as error:
        raise ModelFormatError(f"{path}: not a llama2.c checkpoint: {error}") from error
    if len(data) != checkpoint.file_size:
        raise ModelFormatError(
            f"{path}: a llama2.c checkpoint with this header has {checkpoint.file_size} bytes, not {len(data)}"
        )
    candidates = [path.with_name(f"tok{checkpoint.vocab_size}.bin"), path.with_name("tokenizer.bin")]
    vocabulary = next((candidate for candidate in candidates if candidate.is_file()), None)
    if vocabulary is None:
        tokenizer, note = {"tokenizer.ggml.model": "none"}, f" (neither {' nor '.join(map(str, candidates))} exists)"
    else:
        tokenizer, note = read_vocabulary(vocabulary, checkpoint.vocab_size), ""
    metadata = Metadata(checkpoint.metadata() | tokenizer, f"{path}{note}")
    return ArrayFile(path, metadata, dict(checkpoint.tensors(data)))


def read_vocabulary(path: Path, n_vocab: int) -> dict[str, Any]:
    """Read llama2.c's tokenizer.bin as `tokenizer.ggml.*` keys.

    The file does not store its number of tokens, `n_vocab`. SentencePiece's scheme as in run.c: ids 0, 1 and 2 are
    unknown, BOS and EOS; BOS and a space are put before a text. Raises ModelFormatError naming the file and the token.
    """
    try:
        with path.open("rb") as file:
            tokens, scores = _read_tokens(file, n_vocab)
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot read the file: {error}") from error
    except ModelFormatError as error:
        raise ModelFormatError(f"{path}: not a llama2.c vocabulary of {n_vocab} tokens: {error}") from error
    special = {0: _UNKNOWN, 1: _CONTROL, 2: _CONTROL}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(
            [special.get(i, _BYTE if _BYTE_TOKEN.fullmatch(token) else _NORMAL) for i, token in enumerate(tokens)],
            np.int32,
        ),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
    }


def _read_tokens(file: BinaryIO, n_vocab: int) -> tuple[list[str], list[float]]:
    def read(n_bytes: int, what: str) -> bytes:
        data = file.read(n_bytes)
        if len(data) < n_bytes:
            raise ModelFormatError(f"the file ends within {what}")
        return data

    (longest,) = struct.unpack("<i", read(4, "max_token_length"))
    if not 0 < longest <= _MAX_TOKEN_BYTES:
        raise ModelFormatError(f"max_token_length is {longest}")
    tokens, scores = [], []
    for i in range(n_vocab):
        score, length = struct.unpack("<fi", read(8, f"token {i}"))
        if not math.isfinite(score):
            raise ModelFormatError(f"the score of token {i} is {score}")
        if not 0 <= length <= longest:
            raise ModelFormatError(f"token {i} has {length} bytes; max_token_length is {longest}")
        try:
            text = read(length, f"token {i}").decode()
        except UnicodeDecodeError:
            raise ModelFormatError(f"token {i} is not UTF-8") from None
        tokens.append(text.strip("\n") if i in (1, 2) else text.replace(" ", "\u2581"))
        scores.append(score)
    if file.read(1):
        raise ModelFormatError("the file continues after the last token")
    return tokens, scores


@hookimpl
def register_loaders(register):  # type: ignore[no-untyped-def]
    """Register the loader of llama2.c checkpoints."""
    register(Loader("llama2.c", matches, open_checkpoint))
