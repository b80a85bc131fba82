"""EAGLE-3 draft heads (Li et al. 2025, arXiv:2503.01840).

They have one block of Llama's kind. A matrix fuses the inputs of three layers of the model. The block reads the
embedding of a token beside the fused state of the token before; from the second drafted token on its own output takes
the place of that. Logits are of a part of the model's vocabulary where the file has `d2t`, the ids of its tokens.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Config,
    Graph,
    HeadArchitecture,
    Metadata,
    ModelFormatError,
    Rope,
    TensorTable,
    Value,
    Weights,
    hookimpl,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Eagle3Config(Config):
    """Hyperparameters of a head.

    - `layers`: the layers of the model whose inputs it reads; `n_model`: the width of each.
    - `norm_before_fc`: these are normalised together; `norm_before_residual`: the residual is the normalised state.
    - `n_draft`: the number of tokens that it predicts.
    """

    rope: Rope
    layers: tuple[int, ...]
    n_model: int
    norm_before_fc: bool
    norm_before_residual: bool
    n_draft: int


class Eagle3(HeadArchitecture):
    """`general.architecture = eagle3`."""

    name = "eagle3"

    def configure(self, metadata: Metadata) -> Eagle3Config:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        if common.n_layer != 1:
            raise ModelFormatError(f"{metadata.source}: eagle3.block_count = {common.n_layer}, and such heads have one")
        return Eagle3Config.from_gguf(
            metadata,
            rope=Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=True),
            layers=metadata.get_ints("eagle3.target_layers", 3, minimum=0, maximum=1 << 10),
            n_model=metadata.get_int("eagle3.target_hidden_size", minimum=1, maximum=1 << 20),
            norm_before_fc=metadata.get_bool("eagle3.norm_before_fc", default=False),
            norm_before_residual=metadata.get_bool("eagle3.norm_before_residual", default=False),
            n_draft=common.n_vocab,
        )

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        c: Eagle3Config = config
        table, n_q, n_kv = TensorTable(), c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd, optional=True)
        table.add("fc", c.n_embd, len(c.layers) * c.n_model)
        if c.norm_before_fc:
            table.add("enc.output_norm", len(c.layers) * c.n_model)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_draft, c.n_embd, optional=True)
        table.add("rope_freqs", c.rope.n_dims // 2, optional=True)
        table.add_tensor("d2t", c.n_draft, optional=True)
        block = table.block()
        block.add("attn_norm", c.n_embd)
        block.add("attn_norm_2", c.n_embd)
        block.add("attn_q", n_q, 2 * c.n_embd)
        block.add("attn_k", n_kv, 2 * c.n_embd)
        block.add("attn_v", n_kv, 2 * c.n_embd)
        block.add("attn_output", c.n_embd, n_q)
        block.add("ffn_norm", c.n_embd)
        block.add("ffn_gate", c.n_ff, c.n_embd)
        block.add("ffn_up", c.n_ff, c.n_embd)
        block.add("ffn_down", c.n_embd, c.n_ff)
        return table

    def fuse(self, g: Graph, config: Any, weights: Weights) -> Value:
        """State of a token from the inputs of the layers."""
        c: Eagle3Config = config
        x = g.previous_hidden(len(c.layers) * c.n_model)
        if c.norm_before_fc:
            x = g.rms_norm(x, weights.enc_output_norm, c.rms_eps)
        return g.linear(x, weights.fc)

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Logits from the embedding of a token and the state before it."""
        c: Eagle3Config = config
        w, block = weights, weights.blk[0]
        x = g.previous_hidden(c.n_embd)
        normed = g.rms_norm(x, block.attn_norm_2, c.rms_eps)
        h = g.concat(g.rms_norm(g.embed(w.token_embd), block.attn_norm, c.rms_eps), normed)
        q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
        q, k = (g.rope(heads, c.rope, c.head_dim, w.rope_freqs) for heads in (q, k))
        a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
        x = g.linear(a, block.attn_output) + (normed if c.norm_before_residual else x)
        h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
        x = x + g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)
        g.passed = x
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Eagle3())
