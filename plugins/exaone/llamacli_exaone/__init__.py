"""EXAONE family.

EXAONE 3, 4 and K-EXAONE (LG AI Research 2024 to 2026). arXiv:2408.03541, 2507.11407 and 2601.01739. In EXAONE 4 results
of attention and SwiGLU are normalised, their inputs are not; three of four layers of the 32B model slide, the others
have no RoPE.
"""

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Rope,
    TensorTable,
    Value,
    Weights,
    hookimpl,
    sliding_layers,
)
from llamacli_exaone.decoders import Exaone, ExaoneMoe

LLAMACLI_API = 1

N_LAYER_32B = 64
"""Number of layers by which files of the 32B model are recognised; only these slide."""


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class ExaoneConfig(Config):
    """Hyperparameters of EXAONE.

    `rope` rotates halves of heads (NeoX order). `windows` has one item per layer: the sliding window in tokens, the
    current one included, or None for full attention. `rotates` says which layers have RoPE. `n_nextn` blocks behind the
    others predict tokens further ahead (multi-token prediction); they are not computed.
    """

    rope: Rope
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...]
    n_nextn: int


class Exaone4(Architecture):
    """`general.architecture = exaone4`."""

    name = "exaone4"

    def configure(self, metadata: Metadata) -> ExaoneConfig:
        """Read the hyperparameters; `block_count` includes the blocks of `n_nextn`."""
        common = Config.from_gguf(metadata)
        metadata.get_int(f"{self.name}.rope.dimension_count", default=common.head_dim, minimum=common.head_dim)
        n_nextn = metadata.get_int(
            f"{self.name}.nextn_predict_layers", default=0, minimum=0, maximum=common.n_layer - 1
        )
        n_layer = common.n_layer - n_nextn
        windows = self.windows(metadata, n_layer)
        return ExaoneConfig.from_gguf(
            metadata,
            n_layer=n_layer,
            n_nextn=n_nextn,
            rope=Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False),
            windows=windows,
            rotates=tuple(n_layer != N_LAYER_32B or window is not None for window in windows),
        )

    def windows(self, metadata: Metadata, n_layer: int) -> tuple[int | None, ...]:
        """Sliding window of each layer; by default every fourth layer is full.

        Other models than the 32B one may have the key, but their layers are all full.
        """
        window = metadata.get_int(f"{self.name}.attention.sliding_window", default=4096, minimum=1)
        if n_layer != N_LAYER_32B:
            return (None,) * n_layer
        base, sliding_base = (f"{self.name}.rope.{key}" for key in ("freq_base", "freq_base_swa"))
        if metadata.get(sliding_base, metadata.get(base)) != metadata.get(base):
            raise ModelFormatError(f"{metadata.source}: {sliding_base} differs from {base}; this is not supported")
        slides = sliding_layers(metadata, self.name, n_layer, period=4)
        return tuple(window if sliding else None for sliding in slides)

    def tensors(self, config: ExaoneConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        table.add("rope_freqs", c.rope.n_dims // 2, optional=True)
        for i in range(c.n_layer + c.n_nextn):
            block = table.block(unused=i >= c.n_layer)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_q_norm", c.head_dim)
            block.add("attn_k_norm", c.head_dim)
            block.add("attn_output", c.n_embd, n_q)
            block.add("post_attention_norm", c.n_embd)
            block.add("ffn_gate", c.n_ff, c.n_embd)
            block.add("ffn_up", c.n_ff, c.n_embd)
            block.add("ffn_down", c.n_embd, c.n_ff)
            block.add("post_ffw_norm", c.n_embd)
            if i >= c.n_layer:
                block.add("nextn.eh_proj", c.n_embd, 2 * c.n_embd)
                for norm in ("enorm", "hnorm", "shared_head_norm"):
                    block.add(f"nextn.{norm}", c.n_embd)
        return table

    def forward(self, g: Graph, config: ExaoneConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block, window, rotates in zip(w.blk, c.windows, c.rotates, strict=True):
            q = g.rms_norm(g.linear(x, block.attn_q), block.attn_q_norm, c.rms_eps, c.head_dim)
            k = g.rms_norm(g.linear(x, block.attn_k), block.attn_k_norm, c.rms_eps, c.head_dim)
            if rotates:
                q, k = (g.rope(heads, c.rope, c.head_dim, w.rope_freqs) for heads in (q, k))
            kv = g.store(k, g.linear(x, block.attn_v), head_dim=c.head_dim, window=window)
            a = g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)
            x = x + g.rms_norm(a, block.post_attention_norm, c.rms_eps)

            h = g.linear(g.swiglu(g.linear(x, block.ffn_gate), g.linear(x, block.ffn_up)), block.ffn_down)
            x = x + g.rms_norm(h, block.post_ffw_norm, c.rms_eps)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    register(Exaone())
    register(Exaone4())
    register(ExaoneMoe())
