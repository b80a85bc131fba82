"""Apertus: pre-norm decoder with xIELU and norms of queries and keys.

Hernández-Cano et al. 2025 (arXiv:2509.14233). The feed-forward network has no gate; the activation has four trained
numbers in each layer (Huang and Schlag 2024, arXiv:2411.13010).
"""

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, TensorTable, Value, Weights, hookimpl

LLAMACLI_API = 1


@attrs.frozen
class Xielu:
    """Numbers of xIELU in one layer, as trained."""

    alpha_n: float
    alpha_p: float
    beta: float
    eps: float


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class ApertusConfig(Config):
    """Hyperparameters of Apertus.

    `rope` rotates halves of heads. With `longrope`, frequencies are divided by factors that depend on the length of the
    context. `xielu` has an entry a layer.
    """

    rope: Rope
    longrope: bool
    xielu: tuple[Xielu, ...]


class Apertus(Architecture):
    """`general.architecture = apertus`."""

    name = "apertus"

    def configure(self, metadata: Metadata) -> ApertusConfig:
        """Read the hyperparameters.

        Keys of xIELU are an array, or one number for all layers.
        """
        common = Config.from_gguf(metadata)
        names = [field.name for field in attrs.fields(Xielu)]
        columns = [metadata.get_floats(f"xielu.{name}", common.n_layer) for name in names]
        return ApertusConfig.from_gguf(
            metadata,
            rope=Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False),
            longrope=metadata.get_str("apertus.rope.scaling.type", default="") == "longrope",
            xielu=tuple(Xielu(*numbers) for numbers in zip(*columns, strict=True)),
        )

    def tensors(self, config: ApertusConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        if c.longrope:
            table.add("rope_factors_long", c.rope.n_dims // 2)
            table.add("rope_factors_short", c.rope.n_dims // 2)
        else:
            table.add("rope_freqs", c.rope.n_dims // 2, optional=True)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_q_norm", c.head_dim)
            block.add("attn_k_norm", c.head_dim)
            block.add("attn_output", c.n_embd, n_q, bias=True)
            block.add("ffn_norm", c.n_embd)
            block.add("ffn_up", c.n_ff, c.n_embd)
            block.add("ffn_down", c.n_embd, c.n_ff)
        return table

    def forward(self, g: Graph, config: ApertusConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        factors = (w.rope_factors_short, w.rope_factors_long) if c.longrope else (w.rope_freqs,)
        x = g.embed(w.token_embd)
        for block, xielu in zip(w.blk, c.xielu, strict=True):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.rms_eps, c.head_dim)
            k = g.rms_norm(g.linear(h, block.attn_k), block.attn_k_norm, c.rms_eps, c.head_dim)
            q, k = (g.rope(heads, c.rope, c.head_dim, *factors) for heads in (q, k))
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
            x = x + g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)

            h = g.linear(g.rms_norm(x, block.ffn_norm, c.rms_eps), block.ffn_up)
            h = g.xielu(h, xielu.alpha_n, xielu.alpha_p, xielu.beta, xielu.eps)
            x = x + g.linear(h, block.ffn_down)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Apertus())
