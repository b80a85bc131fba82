"""Seed-OSS 36B (ByteDance Seed 2025): Llama's decoder, biased queries, keys and values.

RoPE rotates halves of heads, and heads may be wider than `embedding_length / head_count`.
"""

from llamacli.plugin import Decoder, hookimpl

LLAMACLI_API = 1


class SeedOss(Decoder):
    """`general.architecture = seed_oss`."""

    name = "seed_oss"
    interleaved = False
    ffn_norm = "post_attention_norm"


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(SeedOss())
