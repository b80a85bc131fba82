#!/usr/bin/env python3
"""Write a GGUF file with a real model's shapes and random weights.

    python benchmarks/make_model.py llama-1b Q8_0 model.gguf
    python benchmarks/make_model.py qwen3-0.6b Q4_K_M model.gguf --vocabulary vocabulary.gguf

The vocabulary is that of another GGUF file, or none. Rows repeat every few hundred, which does not affect speed.
`Q4_K_M` is llama.cpp's mixture: Q6_K for the output and for half of the value and down projections, Q4_K for the rest;
routers are F32.
"""

import argparse
from dataclasses import dataclass, field, replace

import numpy as np

import gguf
from gguf import GGMLQuantizationType as Type


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Hyperparameters of a model.

    - `experts`: number of experts, and of those used per token; `expert_type`: their tensor type if it is fixed.
    - `n_ff_shared`: width of a shared expert with a gate, 0 for none.
    - `fused`: queries, keys and values are one matrix, gate and up another.
    - `factors`: tensors of RoPE frequency factors, which grow from 1 to the given value.
    - `biased`: matrices with biases; `vectors`: further vectors of a block, with lengths.
    - `renamed`: tensors with other names than in Llama.
    - `keys`: further metadata, without the architecture's prefix.
    """

    architecture: str = "llama"
    n_layer: int
    width: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    context: int = 8192
    rms_eps: float = 1e-5
    rope_base: float = 500000.0
    rope_dims: int | None = None
    tied: bool = False
    fused: bool = False
    factors: dict[str, float] = field(default_factory=dict)
    experts: tuple[int, int] | None = None
    expert_type: str | None = None
    n_ff_shared: int = 0
    biased: tuple[str, ...] = ()
    vectors: dict[str, int] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    keys: dict[str, int | float | str] = field(default_factory=dict)


_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")

SHAPES = {
    "llama-1b": Shape(
        n_layer=16, width=2048, n_ff=8192, n_head=32, n_head_kv=8, head_dim=64, n_vocab=128256, tied=True
    ),
    "smollm2-135m": Shape(
        n_layer=30, width=576, n_ff=1536, n_head=9, n_head_kv=3, head_dim=64, n_vocab=49152, tied=True
    ),
    "moe-tiny": Shape(
        n_layer=8, width=1024, n_ff=1024, n_head=16, n_head_kv=4, head_dim=64, n_vocab=32000, experts=(16, 2)
    ),
    "moe-128": Shape(  # the experts of Qwen3-30B-A3B
        n_layer=2, width=2048, n_ff=768, n_head=32, n_head_kv=4, head_dim=128, n_vocab=32000, experts=(128, 8),
        keys={"attention.key_length": 128, "attention.value_length": 128},
    ),
    "gemma3-1b": Shape(
        architecture="gemma3", n_layer=26, width=1152, n_ff=6912, n_head=4, n_head_kv=1, head_dim=256, n_vocab=262144,
        context=32768, rms_eps=1e-6, rope_base=1e6, tied=True,
        vectors={"attn_q_norm": 256, "attn_k_norm": 256, "post_attention_norm": 1152, "post_ffw_norm": 1152},
        keys={"attention.key_length": 256, "attention.value_length": 256, "attention.sliding_window": 512},
    ),
    "qwen3-0.6b": Shape(
        architecture="qwen3", n_layer=28, width=1024, n_ff=3072, n_head=16, n_head_kv=8, head_dim=128, n_vocab=151936,
        context=40960, rope_base=1e6, rms_eps=1e-6, tied=True, vectors={"attn_q_norm": 128, "attn_k_norm": 128},
        keys={"attention.key_length": 128, "attention.value_length": 128},
    ),
    "qwen3-30b-a3b-2-layers": Shape(
        architecture="qwen3moe", n_layer=2, width=2048, n_ff=768, n_head=32, n_head_kv=4, head_dim=128, n_vocab=151936,
        context=40960, rope_base=1e6, rms_eps=1e-6, experts=(128, 8),
        vectors={"attn_q_norm": 128, "attn_k_norm": 128},
        keys={"attention.key_length": 128, "attention.value_length": 128, "expert_feed_forward_length": 768},
    ),
    "qwen1.5-moe-a2.7b-2-layers": Shape(
        architecture="qwen2moe", n_layer=2, width=2048, n_ff=1408, n_head=16, n_head_kv=16, head_dim=128,
        n_vocab=151936, rope_base=1e6, rms_eps=1e-6, experts=(60, 4), n_ff_shared=5632, biased=_ATTENTION[:3],
        keys={"expert_feed_forward_length": 1408, "expert_shared_feed_forward_length": 5632},
    ),
    "phi-3.5-mini": Shape(
        architecture="phi3", n_layer=32, width=3072, n_ff=8192, n_head=32, n_head_kv=32, head_dim=96, n_vocab=32064,
        context=131072, rope_base=1e4, fused=True, factors={"rope_factors_long": 64.0, "rope_factors_short": 2.8},
        keys={"rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": 1.190238},
    ),
    "phi-4-mini": Shape(
        architecture="phi3", n_layer=32, width=3072, n_ff=8192, n_head=24, n_head_kv=8, head_dim=128, n_vocab=200064,
        context=131072, rope_base=1e4, rope_dims=96, tied=True, fused=True,
        factors={"rope_factors_long": 64.0, "rope_factors_short": 1.0},
        keys={"rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": 1.190238},
    ),
    "gpt-oss-20b-2-layers": Shape(
        architecture="gpt-oss", n_layer=2, width=2880, n_ff=2880, n_head=64, n_head_kv=8, head_dim=64, n_vocab=201088,
        context=131072, rope_base=150000.0, experts=(32, 4), expert_type="MXFP4", biased=(*_ATTENTION, *_EXPERTS),
        vectors={"attn_sinks": 64}, renamed={"ffn_norm": "post_attention_norm"},
        keys={
            "attention.key_length": 64, "attention.value_length": 64, "attention.sliding_window": 128,
            "expert_feed_forward_length": 2880, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    ),
}  # fmt: skip
SHAPES["llama-1b-4-layers"] = replace(SHAPES["llama-1b"], n_layer=4)
_SCALES = {  # offsets of float16 scales in blocks of random bytes; those of minima with a factor
    Type.Q2_K: {80: 1, 82: 1.5},
    Type.Q3_K: {108: 1},
    Type.Q4_K: {0: 1, 2: 7.5},
    Type.Q5_K: {0: 1, 2: 15.5},
    Type.Q6_K: {208: 1},
    Type.IQ4_NL: {0: 1},
    Type.IQ4_XS: {0: 1},
    **{kind: {0: 1} for kind in (Type.IQ1_S, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S)},
}
_SIGMA = 0.02
_ROWS = 256


def random_matrix(random: np.random.Generator, shape: tuple[int, ...], kind: Type) -> tuple[np.ndarray, Type]:
    """Random matrix as bytes, uint8 [..., row_bytes], and its type.

    The type is Q8_0 if the width does not fit.
    """
    width = shape[-1]
    if width % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Type.Q8_0
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind in _SCALES:
        blocks = random.integers(0, 256, (_ROWS, width // block, size), dtype=np.uint8)
        set_scale(blocks, kind, 1.0)
        set_scale(blocks, kind, _SIGMA / float(gguf.quants.dequantize(blocks.reshape(_ROWS, -1), kind).std()))
        rows = blocks
    else:
        rows = gguf.quants.quantize(random.normal(0, _SIGMA, (_ROWS, width)).astype(np.float32), kind)
    rows = np.ascontiguousarray(rows).view(np.uint8).reshape(_ROWS, -1)
    n = int(np.prod(shape[:-1]))
    return np.tile(rows, (-(-n // _ROWS), 1))[:n].reshape(*shape[:-1], -1), kind


def set_scale(blocks: np.ndarray, kind: Type, scale: float) -> None:
    """Set scales and minima of blocks, uint8 [..., type_size].

    Minima make the mean weight 0.
    """
    for at, factor in _SCALES[kind].items():
        blocks[..., at : at + 2] = np.frombuffer(np.float16(factor * scale).tobytes(), np.uint8)


def mixed(name: str, layer: int, n_layer: int) -> Type:
    """Type of a tensor in Q4_K_M."""
    more = layer < n_layer // 8 or layer >= 7 * n_layer // 8 or (layer - n_layer // 8) % 3 == 2
    return Type.Q6_K if name == "token_embd" or (name in ("attn_v", "ffn_down") and more) else Type.Q4_K


def copy_vocabulary(path: str, writer: gguf.GGUFWriter) -> int:
    """Copy the `tokenizer.*` keys of a file; returns the number of tokens."""
    fields = {name: found for name, found in gguf.GGUFReader(path).fields.items() if name.startswith("tokenizer.")}
    for name, found in fields.items():
        writer.add_key_value(name, found.contents(), *found.types[:2])
    return len(fields["tokenizer.ggml.tokens"].data)


def write(path: str, name: str, kind: str, vocabulary: str | None = None) -> None:
    """Write the file, optionally with the vocabulary of another one."""
    shape = SHAPES[name]
    writer, random = gguf.GGUFWriter(path, shape.architecture), np.random.default_rng(0)
    writer.add_name(f"{name} {kind}, random weights")
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{kind}", gguf.LlamaFileType.GUESSED))
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_dimension_count(shape.rope_dims or shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    if vocabulary:
        shape = replace(shape, n_vocab=copy_vocabulary(vocabulary, writer))
    else:
        writer.add_tokenizer_model("none")
    writer.add_vocab_size(shape.n_vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts[0])
        writer.add_expert_used_count(shape.experts[1])
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in shape.keys.items():
        add[type(value)](f"{shape.architecture}.{key}", value)

    def matrix(name: str, *dims: int, layer: int = 0, exact: str | None = None) -> None:
        chosen = Type[exact] if exact else mixed(name, layer, shape.n_layer) if kind == "Q4_K_M" else Type[kind]
        data, chosen = random_matrix(random, dims, chosen)
        prefix = "" if name in ("token_embd", "output") else f"blk.{layer}."
        writer.add_tensor(f"{prefix}{name}.weight", data, raw_dtype=chosen)
        if name in shape.biased:
            writer.add_tensor(f"{prefix}{name}.bias", random.normal(0, 0.02, dims[:-1]).astype(np.float32))

    matrix("token_embd", shape.n_vocab, shape.width)
    writer.add_tensor("output_norm.weight", np.ones(shape.width, np.float32))
    if not shape.tied:
        matrix("output", shape.n_vocab, shape.width)
    for name, largest in shape.factors.items():
        pairs = (shape.rope_dims or shape.head_dim) // 2
        writer.add_tensor(f"{name}.weight", np.linspace(1, largest, pairs, dtype=np.float32))
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    for layer in range(shape.n_layer):
        for norm in ("attn_norm", "ffn_norm"):
            named = shape.renamed.get(norm, norm)
            writer.add_tensor(f"blk.{layer}.{named}.weight", np.ones(shape.width, np.float32))
        for name, length in shape.vectors.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", random.normal(0, 1, length).astype(np.float32))
        apart = {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
        for name, n_out in ({"attn_qkv": n_q + 2 * n_kv} if shape.fused else apart).items():
            matrix(name, n_out, shape.width, layer=layer)
        matrix("attn_output", shape.width, n_q, layer=layer)
        experts, suffix = shape.experts[:1] if shape.experts else (), "_exps" if shape.experts else ""
        if experts:
            matrix("ffn_gate_inp", *experts, shape.width, layer=layer, exact="F32")
        ups = {"ffn_up": 2 * shape.n_ff} if shape.fused else {"ffn_gate": shape.n_ff, "ffn_up": shape.n_ff}
        for name, n_out in ups.items():
            matrix(f"{name}{suffix}", *experts, n_out, shape.width, layer=layer, exact=shape.expert_type)
        matrix(f"ffn_down{suffix}", *experts, shape.width, shape.n_ff, layer=layer, exact=shape.expert_type)
        if shape.n_ff_shared:
            gate = random.normal(0, 0.02, shape.width).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp_shexp.weight", gate)
            matrix("ffn_gate_shexp", shape.n_ff_shared, shape.width, layer=layer)
            matrix("ffn_up_shexp", shape.n_ff_shared, shape.width, layer=layer)
            matrix("ffn_down_shexp", shape.width, shape.n_ff_shared, layer=layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", help="Q8_0, Q4_0, Q4_K_M, F16 or any other type of GGUF")
    parser.add_argument("out")
    parser.add_argument("--vocabulary", help="a GGUF file whose vocabulary to use")
    options = parser.parse_args()
    write(options.out, options.shape, options.type, options.vocabulary)


if __name__ == "__main__":
    main()
