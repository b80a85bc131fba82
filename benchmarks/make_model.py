#!/usr/bin/env python3
"""Write a GGUF file of a real model's shape with random weights, to measure speed with.

    python benchmarks/make_model.py llama-1b Q8_0 model.gguf

Rows repeat every few hundred, which no engine notices. `Q4_K_M` is llama.cpp's mixture: Q6_K for the output and for
half of the value and down projections, Q4_K for the rest.
"""

import argparse

import numpy as np

import gguf
from gguf import GGMLQuantizationType as Type

SHAPES = {
    # name: layers, width, feed-forward width, heads, heads of keys and values, head width, vocabulary, tied, experts
    "llama-1b": (16, 2048, 8192, 32, 8, 64, 128256, True, None),
    "smollm2-135m": (30, 576, 1536, 9, 3, 64, 49152, True, None),
    "moe-tiny": (8, 1024, 1024, 16, 4, 64, 32000, False, (16, 2)),
}
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


def write(path: str, shape: str, kind: str, context: int = 8192) -> None:
    """Write the file."""
    n_layer, width, n_ff, n_head, n_head_kv, head_dim, n_vocab, tied, experts = SHAPES[shape]
    writer, random = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_name(f"{shape} {kind}, random weights")
    writer.add_block_count(n_layer)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(n_vocab)
    writer.add_tokenizer_model("none")
    if experts:
        writer.add_expert_count(experts[0])
        writer.add_expert_used_count(experts[1])

    def matrix(name: str, *dims: int, layer: int = 0, exact: Type | None = None) -> None:
        stem = name.split(".")[-1]
        chosen = exact or (mixed(stem, layer, n_layer) if kind == "Q4_K_M" else Type[kind])
        data, chosen = random_matrix(random, dims, chosen)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=chosen)

    matrix("token_embd", n_vocab, width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    if not tied:
        matrix("output", n_vocab, width)
    for layer in range(n_layer):
        b = f"blk.{layer}"
        writer.add_tensor(f"{b}.attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(f"{b}.ffn_norm.weight", np.ones(width, np.float32))
        matrix(f"{b}.attn_q", n_head * head_dim, width, layer=layer)
        matrix(f"{b}.attn_k", n_head_kv * head_dim, width, layer=layer)
        matrix(f"{b}.attn_v", n_head_kv * head_dim, width, layer=layer)
        matrix(f"{b}.attn_output", width, n_head * head_dim, layer=layer)
        if experts:
            matrix(f"{b}.ffn_gate_inp", experts[0], width, exact=Type.F32)
            for name, dims in (("gate", (n_ff, width)), ("up", (n_ff, width)), ("down", (width, n_ff))):
                matrix(f"{b}.ffn_{name}_exps", experts[0], *dims, layer=layer)
        else:
            matrix(f"{b}.ffn_gate", n_ff, width, layer=layer)
            matrix(f"{b}.ffn_up", n_ff, width, layer=layer)
            matrix(f"{b}.ffn_down", width, n_ff, layer=layer)
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
