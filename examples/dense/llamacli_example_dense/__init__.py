"""Dense decoder: RMS norm, rotary attention with grouped heads, SwiGLU."""

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, TensorTable, Value, Weights, hookimpl

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class ExampleDenseConfig(Config):
    """Hyperparameters of example-dense."""

    rope: Rope


class ExampleDense(Architecture):
    """`general.architecture = example-dense`."""

    name = "example-dense"

    def configure(self, metadata: Metadata) -> ExampleDenseConfig:
        """Read the hyperparameters."""
        head_dim = Config.from_gguf(metadata).head_dim
        return ExampleDenseConfig.from_gguf(
            metadata,
            rope=Rope.from_gguf(metadata, self.name, head_dim, interleaved=True),
        )

    def tensors(self, config: ExampleDenseConfig) -> TensorTable:
        """Tensors of a file, rows first."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add("attn_q", n_q, c.n_embd)
            block.add("attn_k", n_kv, c.n_embd)
            block.add("attn_v", n_kv, c.n_embd)
            block.add("attn_output", c.n_embd, n_q)
            block.add("ffn_norm", c.n_embd)
            block.add("ffn_gate", c.n_ff, c.n_embd)
            block.add("ffn_up", c.n_ff, c.n_embd)
            block.add("ffn_down", c.n_embd, c.n_ff)
        return table

    def forward(self, g: Graph, config: ExampleDenseConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k, v = (g.linear(h, part) for part in (block.attn_q, block.attn_k, block.attn_v))
            q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
            kv = g.store(k, v, head_dim=c.head_dim)
            a = g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)
            x = x + a
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            gated = g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up))
            y = g.linear(gated, block.ffn_down)
            x = x + y
        x = g.rms_norm(x, w.output_norm, c.rms_eps)
        return g.linear(x, w.output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(ExampleDense())
