"""Granite Switch: adapters chosen by control tokens (IBM 2026).

Files have low-rank adapters. Behind the control token of an adapter, every product adds that adapter's change. A head
of attention finds the token: its keys are large for control tokens, its values are the numbers of their adapters, and
it has a layer of the cache. Embeddings are those of other tokens in the place of control tokens.
"""

from typing import Any

import attrs
import numpy as np

from llamacli.plugin import (
    Array,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Op,
    Param,
    Params,
    Run,
    Scoring,
    TensorTable,
    Value,
    Weights,
    hookimpl,
    identity,
)
from llamacli_granite import Granite, GraniteConfig

LLAMACLI_API = 1

_PRODUCTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class SwitchConfig(GraniteConfig):
    """Control tokens of adapters 1, 2 and so on.

    Number 0 is none. `substitutes` are the tokens whose embeddings they have, `rank` is that of the adapters, `gain`
    the size of the keys that find control tokens.
    """

    controls: tuple[int, ...]
    substitutes: tuple[int, ...]
    rank: int
    gain: float


@attrs.frozen(eq=False)
class Signal(Op):
    """Number of each token, or `default`, and zeros behind it."""

    values: tuple[tuple[int, float], ...]
    default: float

    def compute(self, run: Run) -> Array:
        values, out = dict(self.values), np.zeros((run.n, self.out.width))
        out[:, 0] = [values.get(token, self.default) for token in run.tokens.tolist()]
        return out


@attrs.frozen(eq=False)
class OneHot(Op):
    """1 in the column nearest to the first number of x."""

    x: Value

    def compute(self, run: Run) -> Array:
        nearest = np.clip(run[self.x][:, 0] + 0.5, 0, self.out.width - 1).astype(np.intp)
        return np.asarray(np.eye(self.out.width)[nearest])


class GraniteSwitch(Granite):
    """`general.architecture = graniteswitch`."""

    name = "graniteswitch"
    config_class = SwitchConfig
    has_options = False

    def read_layers(self, metadata: Metadata) -> dict[str, Any]:
        """Control tokens, and the rank of adapters."""
        common, key = Config.from_gguf(metadata), f"{self.name}.adapters"
        if common.n_expert:
            raise ModelFormatError(f"{metadata.source}: {self.name}.expert_count = {common.n_expert} is not supported")
        n = metadata.get_int(f"{key}.count", minimum=1, maximum=4096)
        controls, substitutes = (
            metadata.get_ints(f"{key}.token_ids_{kind}", n, minimum=0, maximum=common.n_vocab - 1)
            for kind in ("activate", "substitute")
        )
        return {
            "controls": controls,
            "substitutes": substitutes,
            "rank": metadata.get_int(f"{key}.lora_rank", minimum=1, maximum=4096),
            "gain": metadata.get_float(f"{key}.router_gain", default=15.0),
        }

    def add_mixer(self, block: TensorTable, c: Any, i: int) -> None:
        """Projections of the attention of layer i, and changes of all products."""
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        block.add("attn_qkv", n_q + 2 * n_kv, c.n_embd)
        block.add("attn_output", c.n_embd, n_q)
        sizes = {"attn_q": (c.n_embd, n_q), "attn_k": (c.n_embd, n_kv), "attn_v": (c.n_embd, n_kv)} | {
            "attn_output": (n_q, c.n_embd), "ffn_gate": (c.n_embd, c.n_ff), "ffn_up": (c.n_embd, c.n_ff),
            "ffn_down": (c.n_ff, c.n_embd),
        }  # fmt: skip
        for name, (n_in, n_out) in sizes.items():
            block.add_tensor(f"{name}.lora_a", 1 + len(c.controls), c.rank, n_in)
            block.add_tensor(f"{name}.lora_b", 1 + len(c.controls), n_out, c.rank)

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        substitutes = dict(zip(c.controls, c.substitutes, strict=True))
        x = g.scale(g.embed(w.token_embd, substitutes=substitutes), c.embedding_scale)
        chosen = self.adapters(g, c)
        for block in w.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
            parts = zip(_PRODUCTS, block.attn_qkv.split(n_q, n_kv, n_kv), strict=False)
            q, k, v = (_product(g, block, name, h, chosen, part) for name, part in parts)
            q, k = (g.rope(heads, c.rope, c.head_dim) if c.rope else heads for heads in (q, k))
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.attention_scale)
            x = x + g.scale(_product(g, block, "attn_output", a, chosen), c.residual_scale)
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            gate, up = (_product(g, block, name, h, chosen) for name in ("ffn_gate", "ffn_up"))
            x = x + g.scale(_product(g, block, "ffn_down", g.swiglu(gate, up), chosen), c.residual_scale)
        return self.logits(g, c, w, x)

    def adapters(self, g: Graph, c: Any) -> Value:
        """One-hot numbers of the tokens' adapters, the mean of those before."""

        def signal(values: dict[int, float], default: float) -> Value:
            return g.record(Signal(g.value(c.head_dim), tuple(values.items()), default))

        keys = signal(dict.fromkeys(c.controls, c.gain), -c.gain)
        numbers = signal({token: float(i) for i, token in enumerate(c.controls, start=1)}, 0.0)
        found = g.attention(signal({}, 1.0), g.store(keys, numbers, head_dim=c.head_dim), scale=1.0)
        return g.record(OneHot(g.value(1 + len(c.controls)), found))


def _product(g: Graph, block: Params, name: str, x: Value, chosen: Value, weight: Param | None = None) -> Value:
    """Product with a matrix, and with the chosen adapter's change of it."""
    a, b = (getattr(block, f"{name}_lora_{part}") for part in "ab")
    change = g.moe(x, chosen, gate=None, up=a, down=b, n_used=1, activation=identity, scoring=Scoring.SOFTMAX_OF_CHOSEN)
    return g.linear(x, weight or getattr(block, name)) + change


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(GraniteSwitch())
