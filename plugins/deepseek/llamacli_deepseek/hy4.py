"""Hunyuan 4 (Tencent 2026): independent hyper-connections.

Several residual streams lie side by side. Each branch reads a mean of them, weighted by gates of all streams, and its
result is added to each, weighted likewise (after Zhu et al. 2024, arXiv:2409.19606). Attention is DeepSeek's, with
sinks and a gate; in files with an indexer, it reads chosen cells.
"""

import functools
from collections.abc import Sequence
from typing import Any

import attrs

from llamacli.plugin import (
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    experts_and_shared,
    hookimpl,
    network,
    sigmoid,
    swiglu_clamped,
)
from llamacli_deepseek.clamps import limits
from llamacli_deepseek.deepseek2 import DeepSeek2, DeepSeek2Config
from llamacli_deepseek.sparse import Indexer
from llamacli_deepseek.streams import add_gates, gate_inputs, stream_gate

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Hy4Config(DeepSeek2Config):
    """Number of residual streams, and their gates.

    `limits` are the bounds of experts by layer, 0 for none. Layers that do not choose cells read those of the layer
    before, or all without an `indexer`.
    """

    n_stream: int
    gate_eps: float
    magnitude: float
    limits: tuple[float, ...]
    indexer: Indexer | None
    chooses: tuple[bool, ...]


class HyV4(DeepSeek2):
    """`general.architecture = hy_v4`."""

    name = "hy_v4"

    def configure(self, metadata: Metadata) -> Hy4Config:
        """Read the hyperparameters."""
        common = super().configure(metadata)
        if not common.absorbed or not common.rank_q:
            raise ModelFormatError(f"{metadata.source}: {self.name}.attention.q_lora_rank or key_length_mla is missing")
        streams = f"{self.name}.hyper_connection"
        return Hy4Config(
            **{field.name: getattr(common, field.name) for field in attrs.fields(type(common))},
            n_stream=metadata.get_int(f"{streams}.count", minimum=1, maximum=64),
            gate_eps=metadata.get_float(f"{streams}.epsilon"),
            magnitude=metadata.get_float(f"{streams}.magnitude"),
            limits=limits(metadata, f"{self.name}.swiglu_clamp_exp", common.n_layer),
            **self.choice(metadata, common),
        )

    def choice(self, metadata: Metadata, common: DeepSeek2Config) -> dict[str, Any]:
        """Indexer, and the layers that have it, the first at least."""
        key = f"{self.name}.attention.indexer"
        if not metadata.get_int(f"{key}.top_k", default=0, minimum=0):
            return {"indexer": None, "chooses": (False,) * common.n_layer}
        chooses = metadata.get_bools(f"{key}.types", common.n_layer)
        if not chooses[0]:
            raise ModelFormatError(f"{metadata.source}: {key}.types: the first layer must choose")
        indexer = Indexer.from_gguf(metadata, self.name, common.rope, at_end=True)
        return {"indexer": attrs.evolve(indexer, norm_eps=common.rms_eps), "chooses": chooses}

    def rope_and_scale(self, metadata: Metadata, n_rope: int, key_dim: int) -> tuple[Rope, float]:
        """RoPE and the factor of scores."""
        rope = Rope.from_gguf(metadata, self.name, n_rope, interleaved=True)
        return attrs.evolve(rope, first=key_dim - n_rope), key_dim**-0.5

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file, with the gates of the last mean."""
        table = super().tensors(config)
        table.add("output", config.n_vocab, config.n_embd)
        add_gates(table, "output_hc", config.n_stream, config.n_embd)
        return table

    def add_block(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of block i, with the gates of both branches."""
        super().add_block(block, c, i)
        block.add("attn_sinks", c.n_head)
        block.add("attn_gate", c.n_head * c.value_dim, c.n_embd)
        if c.chooses[i]:
            c.indexer.add_tensors(block, c.n_embd, c.rank_q)
        for name in ("hc_attn", "hc_ffn"):
            add_gates(block, name, c.n_stream, c.n_embd, 2)

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        streams, cells = [g.embed(w.token_embd)] * c.n_stream, None
        for i, block in enumerate(w.blk):
            x, post = self.read(g, c, streams, block, "hc_attn", 2)
            h, h_q = self.attention_inputs(g, c, block, x)
            cells = c.indexer.choose(g, block, h, h_q) if c.chooses[i] else cells
            y = self.attention(g, c, block, h, h_q, cells)
            streams = [x + g.mul(y, one) for x, one in zip(streams, post, strict=True)]
            x, post = self.read(g, c, streams, block, "hc_ffn", 2)
            y = self.branch(g, c, block, g.rms_norm(x, block.ffn_norm, c.rms_eps), i)
            streams = [x + g.mul(y, one) for x, one in zip(streams, post, strict=True)]
        x, _ = self.read(g, c, streams, w, "output_hc", 1)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)

    def read(
        self, g: Graph, c: Any, streams: Sequence[Value], params: Params, name: str, n: int
    ) -> tuple[Value, list[Value]]:
        """Weighted sum of the streams, and the weights of additions to them."""
        gates = gate_inputs(g, params, name, functools.reduce(g.concat, streams), c.n_stream, c.rms_eps)
        found = [
            stream_gate(g, g.columns(gates, i, 1), 1.0 if i < c.n_stream else c.magnitude, c.gate_eps)
            for i in range(n * c.n_stream)
        ]
        parts = [g.mul(x, one) for x, one in zip(streams, found, strict=False)]
        return functools.reduce(g.add, parts), found[c.n_stream :]

    def attend(self, g: Graph, c: Any, block: Params, q: Value, kv: Any, cells: Any) -> Value:
        """Mean of the compressed values for each head, with sinks."""
        return g.attention(q, kv, scale=c.scale, sinks=block.attn_sinks, cells=cells)

    def project_out(self, g: Graph, c: Any, block: Params, h: Value, a: Value) -> Value:
        """Output of attention behind its gate."""
        return g.linear(g.mul(a, g.map(g.linear(h, block.attn_gate), sigmoid)), block.attn_output)

    def branch(self, g: Graph, c: Any, block: Params, h: Value, i: int) -> Value:
        """Network, or bounded experts beside the shared ones."""
        if i < c.n_dense:
            return network(g, block, h)
        bounded = {"activation": swiglu_clamped(c.limits[i])} if c.limits[i] else {}
        return experts_and_shared(g, block, h, selection_bias=block.exp_probs_b_bias, **c.routing, **bounded)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(HyV4())
