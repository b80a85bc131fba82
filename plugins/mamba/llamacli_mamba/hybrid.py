"""Jamba and Falcon-H1: state space layers and attention."""

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Duality,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    SelectiveScan,
    TensorTable,
    Value,
    Weights,
)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class JambaConfig(Config):
    """Hyperparameters of Jamba.

    `heads_kv` are the heads of keys and values of each layer; layers with 0 are selective scans.
    """

    scan: SelectiveScan
    heads_kv: tuple[int, ...]


class Jamba(Architecture):
    """`general.architecture = jamba`: attention has no positions."""

    name = "jamba"

    def configure(self, metadata: Metadata) -> JambaConfig:
        """Read the hyperparameters."""
        n_layer = metadata.get_int("jamba.block_count", minimum=1, maximum=1 << 10)
        heads_kv = metadata.get_ints("jamba.attention.head_count_kv", n_layer, minimum=0, maximum=1 << 14)
        return JambaConfig.from_gguf(
            metadata,
            n_head_kv=max(*heads_kv, 1),
            heads_kv=heads_kv,
            scan=SelectiveScan.from_gguf(metadata, self.name),
        )

    def tensors(self, config: JambaConfig) -> TensorTable:
        """The tensors of a file; layers with a router have experts."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for n_head_kv in c.heads_kv:
            block, n_q, n_kv = table.block(), c.n_head * c.head_dim, n_head_kv * c.head_dim
            block.add("attn_norm", c.n_embd)
            if n_head_kv:
                block.add_fused("attn_qkv", attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd))
                block.add("attn_output", c.n_embd, n_q)
            else:
                c.scan.add_tensors(block, c.n_embd, has_norms=True)
            block.add("ffn_norm", c.n_embd)
            has_experts, wide, narrow = c.n_expert > 0, (c.n_ff, c.n_embd), (c.n_embd, c.n_ff)
            for name, shape in {"gate": wide, "up": wide, "down": narrow}.items():
                block.add(f"ffn_{name}", *shape, optional=has_experts)
                if has_experts:
                    block.add(f"ffn_{name}_exps", c.n_expert, *shape, optional=True)
            if has_experts:
                block.add("ffn_gate_inp", c.n_expert, c.n_embd, optional=True)
        return table

    def forward(self, g: Graph, config: JambaConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, (block, n_head_kv) in enumerate(zip(w.blk, c.heads_kv, strict=True)):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            if n_head_kv:
                kv = g.store(g.linear(h, block.attn_k), g.linear(h, block.attn_v), head_dim=c.head_dim)
                a = g.attention(g.linear(h, block.attn_q), kv, scale=c.head_dim**-0.5)
                x = x + g.linear(a, block.attn_output)
            else:
                x = x + c.scan.layer(g, block, h, c.rms_eps, has_norms=True)
            x = x + self.feed_forward(g, c, i, block, g.rms_norm(x, block.ffn_norm, c.rms_eps))
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def feed_forward(self, g: Graph, c: JambaConfig, i: int, block: Params, h: Value) -> Value:
        """SwiGLU network, or experts with the weights of a softmax over all."""
        if c.n_expert and block.ffn_gate_inp:
            experts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
            if missing := [name for name, param in experts.items() if param is None]:
                raise ModelFormatError(f"blk.{i} has ffn_gate_inp.weight, but no ffn_{missing[0]}_exps.weight")
            return g.moe(h, g.linear(h, block.ffn_gate_inp), **experts, n_used=c.n_expert_used, renormalize=False)
        if not (block.ffn_gate and block.ffn_up and block.ffn_down):
            raise ModelFormatError(f"blk.{i} has neither ffn_gate_inp.weight nor ffn_gate, ffn_up and ffn_down")
        return g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class FalconH1Config(Config):
    """Hyperparameters of Falcon-H1; `rope` rotates halves of heads (NeoX order)."""

    rope: Rope
    space: Duality


class FalconH1(Architecture):
    """`general.architecture = falcon-h1`: attention beside a state space layer."""

    name = "falcon-h1"

    def configure(self, metadata: Metadata) -> FalconH1Config:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        return FalconH1Config.from_gguf(
            metadata,
            rope=Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False),
            space=Duality.from_gguf(metadata, self.name),
        )

    def tensors(self, config: FalconH1Config) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            c.space.add_tensors(block, c.n_embd, needs_norm=False, needs_bias=False)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, n_q)
            block.add_tensor("ffn_norm", c.n_embd)  # files have no suffix here
            block.add("ffn_gate", c.n_ff, c.n_embd, bias=True)
            block.add("ffn_up", c.n_ff, c.n_embd, bias=True)
            block.add("ffn_down", c.n_embd, c.n_ff, bias=True)
        return table

    def forward(self, g: Graph, config: FalconH1Config, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
            x = x + (g.linear(a, block.attn_output) + c.space.layer(g, block, h, c.rms_eps))
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            x = x + g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)
