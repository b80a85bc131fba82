"""Granite 3 and 4: pre-norm decoders with scales, dense or with experts.

Granite Team 2024 (Granite 3.0 Language Models); scales as in Power Scheduler (Shen et al. 2024, arXiv:2408.13359).
RMSNorm, grouped heads, SwiGLU. Four numbers of the file scale embeddings, residual branches, scores and logits.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np

from llamacli.plugin import (
    Architecture,
    Config,
    Duality,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    hookimpl,
)
from llamacli_granite.chat import FORMAT

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class GraniteConfig(Config):
    """Hyperparameters of Granite.

    `rope` rotates adjacent pairs; without it, heads are not rotated. With `longrope`, frequencies are divided by
    factors that depend on the length of the context. `logit_scale` divides logits, the other scales multiply.
    `n_ff_shared` is the width of the shared expert, 0 if there is none. `recurrent` says which layers have a state
    space, of the sizes `space`, in place of attention.
    """

    rope: Rope | None
    longrope: bool
    embedding_scale: float
    residual_scale: float
    attention_scale: float
    logit_scale: float
    n_ff_shared: int
    recurrent: tuple[bool, ...] = ()
    space: Duality | None = None


class Granite(Architecture):
    """`general.architecture = granite`."""

    name = "granite"
    config_class: type[GraniteConfig] = GraniteConfig
    has_options = True
    """True for files that may have biases of networks and factors of RoPE."""
    scaled: ClassVar[Mapping[str, float]] = {}
    """`default` of the scale of logits where files may lack it."""
    always_rotated = False
    """True where llama.cpp does not read the key `rope.scaling.finetuned`."""

    def configure(self, metadata: Metadata) -> GraniteConfig:
        """Read the hyperparameters; scales of 0 are those that are not set."""
        layers = self.read_layers(metadata)
        head_dim = Config.from_gguf(metadata, **{key: layers[key] for key in layers if key == "n_head_kv"}).head_dim
        rotated = self.always_rotated or metadata.get_bool(f"{self.name}.rope.scaling.finetuned", default=True)
        rope = Rope.from_gguf(metadata, self.name, head_dim, interleaved=True)

        def scale(key: str, default: float) -> float:
            return metadata.get_float(f"{self.name}.{key}", default=0.0, minimum=0.0) or default

        return self.config_class.from_gguf(
            metadata,
            **layers,
            rope=rope if rotated else None,
            longrope=rotated and metadata.get_str(f"{self.name}.rope.scaling.type", default="") == "longrope",
            embedding_scale=scale("embedding_scale", 1.0),
            residual_scale=scale("residual_scale", 1.0),
            attention_scale=scale("attention.scale", head_dim**-0.5),
            logit_scale=metadata.get_float(f"{self.name}.logit_scale", minimum=1e-9, **self.scaled),
            n_ff_shared=metadata.get_int(
                f"{self.name}.expert_shared_feed_forward_length", default=0, minimum=0, maximum=1 << 24
            ),
        )

    def read_layers(self, metadata: Metadata) -> dict[str, Any]:
        """Further fields, such as those of layers that are not attention."""
        key = f"{self.name}.attention.head_count_kv"
        if key not in metadata or not isinstance(metadata.peek(key), np.ndarray):
            return {}
        n_layer = metadata.get_int(f"{self.name}.block_count", minimum=1, maximum=1 << 16)
        heads = metadata.get_ints(key, n_layer, minimum=1, maximum=1 << 14)  # of Granite 4.0 without state spaces
        if len(set(heads)) > 1:
            raise ModelFormatError(f"{metadata.source}: {key} = {list(heads)}, expected one number for all layers")
        return {"n_head_kv": heads[0]}

    def tensors(self, config: GraniteConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        if c.longrope and c.rope and self.has_options:
            table.add("rope_factors_long", c.rope.n_dims // 2)
            table.add("rope_factors_short", c.rope.n_dims // 2)
        elif c.rope and self.has_options:
            table.add("rope_freqs", c.rope.n_dims // 2, optional=True)
        for i in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            self.add_mixer(block, c, i)
            block.add("ffn_norm", c.n_embd)
            if c.n_expert:
                block.add("ffn_gate_inp", c.n_expert, c.n_embd)
                block.add("ffn_gate_exps", c.n_expert, c.n_ff, c.n_embd)
                block.add("ffn_up_exps", c.n_expert, c.n_ff, c.n_embd)
                block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff)
                if c.n_ff_shared:
                    block.add("ffn_gate_shexp", c.n_ff_shared, c.n_embd)
                    block.add("ffn_up_shexp", c.n_ff_shared, c.n_embd)
                    block.add("ffn_down_shexp", c.n_embd, c.n_ff_shared)
            else:
                block.add("ffn_gate", c.n_ff, c.n_embd, bias=self.has_options)
                block.add("ffn_up", c.n_ff, c.n_embd, bias=self.has_options)
                block.add("ffn_down", c.n_embd, c.n_ff, bias=self.has_options)
        return table

    def add_mixer(self, block: TensorTable, c: GraniteConfig, i: int) -> None:
        """Projections of the attention of layer i."""
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        block.add_fused("attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd))
        block.add("attn_output", c.n_embd, n_q, bias=True)

    def forward(self, g: Graph, config: GraniteConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.scale(g.embed(w.token_embd), c.embedding_scale)
        for i, block in enumerate(w.blk):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            x = x + g.scale(self.mix(g, c, w, i, h), c.residual_scale)
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            x = x + g.scale(self.feed_forward(g, c, block, h), c.residual_scale)
        return self.logits(g, c, w, x)

    def logits(self, g: Graph, c: GraniteConfig, w: Weights, x: Value) -> Value:
        """Logits of the last layer's output."""
        return g.scale(g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd), 1 / c.logit_scale)

    def mix(self, g: Graph, c: GraniteConfig, w: Weights, i: int, h: Value) -> Value:
        """Attention of layer i."""
        block = w.blk[i]
        q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
        if c.rope:
            factors = (w.rope_factors_short, w.rope_factors_long) if c.longrope else (w.rope_freqs,)
            q, k = (g.rope(heads, c.rope, c.head_dim, *factors) for heads in (q, k))
        a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.attention_scale)
        return g.linear(a, block.attn_output)

    def feed_forward(self, g: Graph, c: GraniteConfig, block: Params, h: Value) -> Value:
        """SwiGLU network, or routed experts plus the shared one."""
        if not c.n_expert:
            gate, up = (g.linear(h, param, scale_last=True) for param in (block.ffn_gate, block.ffn_up))
            return g.linear(g.swiglu(gate, up), block.ffn_down, scale_last=True)
        experts = {"gate": block.ffn_gate_exps, "up": block.ffn_up_exps, "down": block.ffn_down_exps}
        routed = g.moe(h, g.linear(h, block.ffn_gate_inp), **experts, n_used=c.n_expert_used)
        if not c.n_ff_shared:
            return routed
        shared = g.swiglu(g.linear(h, block.ffn_gate_shexp), g.linear(h, block.ffn_up_shexp))
        return routed + g.linear(shared, block.ffn_down_shexp)


class GraniteMoe(Granite):
    """`general.architecture = granitemoe`."""

    name = "granitemoe"
    always_rotated = True


class GraniteHybrid(Granite):
    """`general.architecture = granitehybrid`: Granite 4, with state spaces.

    Layers without heads of keys and values have a state space (SSD) in place of attention.
    """

    name = "granitehybrid"
    scaled: ClassVar[Mapping[str, float]] = {"default": 1.0}

    def read_layers(self, metadata: Metadata) -> dict[str, Any]:
        """Layers with a state space, and its sizes."""
        n_layer = metadata.get_int(f"{self.name}.block_count", minimum=1, maximum=1 << 10)
        heads_kv = metadata.get_ints(f"{self.name}.attention.head_count_kv", n_layer, minimum=0, maximum=1 << 14)
        if len({*heads_kv} - {0}) > 1:
            raise ModelFormatError(
                f"{metadata.source}: {self.name}.attention.head_count_kv = {list(heads_kv)}, expected one number and 0"
            )
        return {
            "n_head_kv": max(*heads_kv, 1),
            "recurrent": tuple(n == 0 for n in heads_kv),
            "space": Duality.from_gguf(metadata, self.name),
        }

    def add_mixer(self, block: TensorTable, c: GraniteConfig, i: int) -> None:
        """Tensors of the state space or the attention of layer i."""
        if c.recurrent[i] and c.space:
            c.space.add_tensors(block, c.n_embd)
        else:
            super().add_mixer(block, c, i)

    def mix(self, g: Graph, c: GraniteConfig, w: Weights, i: int, h: Value) -> Value:
        """State space or attention of layer i."""
        if c.recurrent[i] and c.space:
            return c.space.layer(g, w.blk[i], h, c.rms_eps)
        return super().mix(g, c, w, i, h)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the family's architectures."""
    register(Granite())
    register(GraniteMoe())
    register(GraniteHybrid())


@hookimpl
def register_chat_formats(register):  # type: ignore[no-untyped-def]
    """Register the chat format of this family."""
    register(FORMAT)
