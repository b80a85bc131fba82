"""MiniCPM 1, 2 and 4: Llama's decoder with muP scales.

Hu et al. 2024 (arXiv:2404.06395). Embeddings and residual branches are multiplied by a scale, logits divided by one.
"""

import logging
from typing import Any

import attrs

from llamacli.plugin import Graph, Metadata, TensorTable, Value, Weights, hookimpl
from llamacli_llama import Llama, LlamaConfig

LLAMACLI_API = 1

EMBEDDING_SCALE = 12.0
DEPTH_SCALE = 1.4
BASE_WIDTH = 256

_log = logging.getLogger(__name__)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class MiniCPMConfig(LlamaConfig):
    """Hyperparameters of MiniCPM.

    With `longrope`, frequencies are divided by factors that depend on the length of the context.
    """

    longrope: bool
    embedding_scale: float
    residual_scale: float
    logit_scale: float


class MiniCPM(Llama):
    """`general.architecture = minicpm`."""

    name = "minicpm"

    def configure(self, metadata: Metadata) -> MiniCPMConfig:
        """Read the hyperparameters.

        Scales that a file lacks are llama.cpp's. Its logit scale is 256 / n_embd, the reciprocal of what converters
        write: logits of such files are larger than those of the original model by (n_embd / 256)^2.
        """
        llama = super().configure(metadata)
        logit_scale = f"{self.name}.logit_scale"
        if logit_scale not in metadata:
            _log.warning("%s: %s is missing: logits are scaled as by llama.cpp", metadata.source, logit_scale)

        def scale(key: str, default: float) -> float:
            return metadata.get_float(f"{self.name}.{key}", default=default, minimum=0.0)

        return MiniCPMConfig.from_gguf(
            metadata,
            rope=llama.rope,
            longrope=metadata.get_str(f"{self.name}.rope.scaling.type", default="") == "longrope",
            embedding_scale=scale("embedding_scale", EMBEDDING_SCALE) or 1.0,
            residual_scale=scale("residual_scale", DEPTH_SCALE / llama.n_layer**0.5) or 1.0,
            logit_scale=metadata.get_float(logit_scale, default=BASE_WIDTH / llama.n_embd, minimum=1e-9),
        )

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file, with factors of LongRoPE."""
        c: MiniCPMConfig = config
        table = super().tensors(c)
        if c.longrope:
            table.add("rope_factors_long", c.rope.n_dims // 2)
            table.add("rope_factors_short", c.rope.n_dims // 2)
        return table

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to logits."""
        c: MiniCPMConfig = config
        w = weights
        factors = (w.rope_factors_short, w.rope_factors_long) if c.longrope else (w.rope_freqs,)
        x = g.scale(g.embed(w.token_embd), c.embedding_scale)
        for block in w.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            q, k = (g.rope(heads, c.rope, c.head_dim, *factors) for heads in (q, k))
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
            x = x + g.scale(g.linear(a, block.attn_output), c.residual_scale)
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            x = x + g.scale(self.feed_forward(g, c, block, h), c.residual_scale)
        logits = g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)
        return g.scale(logits, 1 / c.logit_scale)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(MiniCPM())
