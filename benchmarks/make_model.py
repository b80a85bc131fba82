#!/usr/bin/env python3
"""Write a GGUF file of a real model's shape with random weights, to measure speed with.

    python benchmarks/make_model.py llama-1b Q8_0 model.gguf

Rows repeat every few hundred, which no engine notices. `Q4_K_M` is llama.cpp's mixture: Q6_K for the output and for
half of the value and down projections, Q4_K for the rest; routers are F32.
"""

import argparse
from dataclasses import dataclass, field

import numpy as np

import gguf
from gguf import GGMLQuantizationType as Type


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's hyperparameters.

    `experts` are their number and how many a token uses, `expert_type` is their tensor type if it is always the same.
    `biased` are the block's matrices that have biases, `vectors` its further vectors with their lengths, `renamed` what
    is called otherwise than in Llama. `keys` are further keys, without the architecture's name in front.
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
    tied: bool = False
    experts: tuple[int, int] | None = None
    expert_type: str | None = None
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
_SCALES = {  # where the float16 scales stand in blocks whose other bytes may be anything
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_XS: (0,),
}
_ROWS = 256


def random_matrix(random: np.random.Generator, shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """Bytes of a matrix, uint8 [..., row_bytes], of weights of about 0.02."""
    width = shape[-1]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if width % block:
        kind, (block, size) = Type.Q8_0, gguf.GGML_QUANT_SIZES[Type.Q8_0]
    if kind in _SCALES:
        rows = random.integers(0, 256, (_ROWS, width // block, size), dtype=np.uint8)
        for at in _SCALES[kind]:
            rows[..., at : at + 2] = np.full((_ROWS, width // block, 1), 2e-4, np.float16).view(np.uint8)
    else:
        rows = gguf.quants.quantize(random.normal(0, 0.02, (_ROWS, width)).astype(np.float32), kind)
    rows = np.ascontiguousarray(rows).view(np.uint8).reshape(_ROWS, -1)
    n = int(np.prod(shape[:-1]))
    return np.tile(rows, (-(-n // _ROWS), 1))[:n].reshape(*shape[:-1], -1), kind


def mixed(name: str, layer: int, n_layer: int) -> Type:
    """The type that Q4_K_M gives a tensor."""
    more = layer < n_layer // 8 or layer >= 7 * n_layer // 8 or (layer - n_layer // 8) % 3 == 2
    return Type.Q6_K if name == "token_embd" or (name in ("attn_v", "ffn_down") and more) else Type.Q4_K


def write(path: str, name: str, kind: str) -> None:
    """Write the file."""
    shape = SHAPES[name]
    writer, random = gguf.GGUFWriter(path, shape.architecture), np.random.default_rng(0)
    writer.add_name(f"{name} {kind}, random weights")
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("none")
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
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    for layer in range(shape.n_layer):
        for norm in ("attn_norm", "ffn_norm"):
            named = shape.renamed.get(norm, norm)
            writer.add_tensor(f"blk.{layer}.{named}.weight", np.ones(shape.width, np.float32))
        for name, length in shape.vectors.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", random.normal(0, 1, length).astype(np.float32))
        matrix("attn_q", n_q, shape.width, layer=layer)
        matrix("attn_k", n_kv, shape.width, layer=layer)
        matrix("attn_v", n_kv, shape.width, layer=layer)
        matrix("attn_output", shape.width, n_q, layer=layer)
        experts, suffix = shape.experts[:1] if shape.experts else (), "_exps" if shape.experts else ""
        if experts:
            matrix("ffn_gate_inp", *experts, shape.width, layer=layer, exact="F32")
        matrix(f"ffn_gate{suffix}", *experts, shape.n_ff, shape.width, layer=layer, exact=shape.expert_type)
        matrix(f"ffn_up{suffix}", *experts, shape.n_ff, shape.width, layer=layer, exact=shape.expert_type)
        matrix(f"ffn_down{suffix}", *experts, shape.width, shape.n_ff, layer=layer, exact=shape.expert_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", help="Q8_0, Q4_0, Q4_K_M, F16 or any other type of GGUF")
    parser.add_argument("out")
    options = parser.parse_args()
    write(options.out, options.shape, options.type)


if __name__ == "__main__":
    main()
