"""RWKV-7: a linear recurrence without attention.

Peng et al. 2025 (RWKV-7 "Goose", arXiv:2503.14456). Each layer mixes tokens by a matrix state a head, whose decay and
correction depend on the token, and channels by a network with squared ReLU; both see the token before as well (token
shift). LayerNorm before each.
"""

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    TensorTable,
    Value,
    Weights,
    exp,
    hookimpl,
    relu_squared,
    sigmoid,
    tanh,
)
from llamacli_rwkv.chat import FORMATS
from llamacli_rwkv.dot import dot

LLAMACLI_API = 1
LLAMACLI_KERNEL_API = 2

_GROUP_NORM_EPS = 64e-5
_LENGTH_EPS = 1e-12
_DECAY = -0.606531  # -exp(-0.5)
_N_MIXES = 6


@attrs.frozen
class Ranks:
    """Widths of the low-rank projections.

    Of decays, of learning rates in the context, of the mix with the first layer's values, and of gates.
    """

    decay: int
    rate: int
    value: int
    gate: int


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class RwkvConfig(Config):
    """Hyperparameters of RWKV-7; heads are `head_dim` wide."""

    ranks: Ranks


class Rwkv7(Architecture):
    """`general.architecture = rwkv7`."""

    name = "rwkv7"
    n_shift = 2

    def configure(self, metadata: Metadata) -> RwkvConfig:
        """Read the hyperparameters; files count 0 heads of attention."""
        name = self.name
        head_dim = metadata.get_int(f"{name}.wkv.head_size", minimum=1, maximum=1 << 10)
        n_embd = metadata.get_int(f"{name}.embedding_length", minimum=1, maximum=1 << 20)
        if n_embd % head_dim or head_dim % 16:
            raise ModelFormatError(
                f"{metadata.source}: {name}.wkv.head_size = {head_dim}, expected a multiple of 16 that divides "
                f"{name}.embedding_length = {n_embd}"
            )
        metadata.get_int(f"{name}.attention.head_count", default=0, minimum=0)
        metadata.get_int(f"{name}.token_shift_count", default=self.n_shift, minimum=self.n_shift, maximum=self.n_shift)
        n_head = n_embd // head_dim

        def rank(key: str) -> int:
            return metadata.get_int(f"{name}.attention.{key}_lora_rank", minimum=1, maximum=1 << 20)

        return RwkvConfig.from_gguf(
            metadata,
            n_head=n_head,
            n_head_kv=n_head,
            head_dim=head_dim,
            ranks=Ranks(rank("decay"), rank("iclr"), rank("value_residual_mix"), self.gate_rank(metadata)),
            **self.epsilon(metadata),
        )

    def gate_rank(self, metadata: Metadata) -> int:
        """Width of the low-rank projection of gates."""
        return metadata.get_int(f"{self.name}.attention.gate_lora_rank", minimum=1, maximum=1 << 20)

    def epsilon(self, metadata: Metadata) -> dict[str, float]:
        """Field of the epsilon of the norms."""
        key = f"{self.name}.attention.layer_norm_epsilon"
        return {"layer_norm_eps": metadata.get_float(key, minimum=0.0, maximum=1.0)}

    def tensors(self, config: RwkvConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n = c.n_embd
        table.add("token_embd", c.n_vocab, n)
        table.add("token_embd_norm", n, needs_bias=True)
        table.add("output_norm", n, needs_bias=True)
        table.add("output", c.n_vocab, n)
        for i in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", n, needs_bias=True)
            block.add("attn_norm_2", n, needs_bias=True)
            self.add_mix(block, c, i)
            block.add("time_mix_ln", n)
            block.add_tensor("time_mix_ln.bias", n)
            block.add_tensor("channel_mix_lerp_k.weight", 1, 1, n)
            block.add("channel_mix_key", c.n_ff, n)
            block.add("channel_mix_value", n, c.n_ff)
        return table

    def add_mix(self, block: TensorTable, c: RwkvConfig, i: int) -> None:
        """Tensors of the time mix of block i.

        The first one mixes no values.
        """
        n, ranks = c.n_embd, c.ranks
        block.add_tensor("time_mix_lerp_fused.weight", _N_MIXES if ranks.gate else _N_MIXES - 1, 1, 1, n)
        low_ranks = {"w": ranks.decay, "a": ranks.rate} | ({"v": ranks.value} if i else {})
        for letter, rank in low_ranks.items():
            block.add(f"time_mix_{letter}0", n)
            block.add(f"time_mix_{letter}1", rank, n)
            block.add(f"time_mix_{letter}2", n, rank)
        if not i:
            block.add_unused("time_mix_v0", n)
            block.add_unused("time_mix_v1", ranks.rate, n)
            block.add_unused("time_mix_v2", n, ranks.rate)
        if ranks.gate:
            block.add("time_mix_g1", ranks.gate, n)
            block.add("time_mix_g2", n, ranks.gate)
        for name in ("k_k", "k_a", "r_k"):
            block.add(f"time_mix_{name}", n)
        for name in ("receptance", "key", "value", "output"):
            block.add(f"time_mix_{name}", n, n)

    def forward(self, g: Graph, config: RwkvConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        eps, first = c.layer_norm_eps, None
        x = g.layer_norm(g.embed(w.token_embd), w.token_embd_norm, eps)
        for block in w.blk:
            h = g.layer_norm(x, block.attn_norm, eps)
            mixed, first = self.time_mix(g, c, block, h, first)
            x = x + mixed
            x = x + self.channel_mix(g, c, block, g.layer_norm(x, block.attn_norm_2, eps))
        return g.linear(g.layer_norm(x, w.output_norm, eps), w.output)

    def time_mix(self, g: Graph, c: RwkvConfig, block: Params, h: Value, first: Value | None) -> tuple[Value, Value]:
        """Mix tokens; `first` are the first layer's values, which are returned too.

        For each head, S = diag(w) S + (a kappa) (S^T -kappa)^T + k v^T, y = S^T r, with kappa the direction of k * k_k.
        """
        shift = g.short_conv(h, (1.0, -1.0))  # the token before, minus this one
        n_mixes = _N_MIXES if c.ranks.gate else _N_MIXES - 1
        mixes = block.time_mix_lerp_fused_weight.reshaped(n_mixes, 1, c.n_embd)
        x_r, x_w, x_k, x_v, x_a, *x_g = (h + g.mul(shift, mixes.matrix(i).reshaped(c.n_embd)) for i in range(n_mixes))

        def low_rank(x: Value, letter: str) -> Value:
            inner = g.linear(x, getattr(block, f"time_mix_{letter}1"))
            inner = g.map(inner, tanh) if letter == "w" else inner
            return g.add(g.linear(inner, getattr(block, f"time_mix_{letter}2")), getattr(block, f"time_mix_{letter}0"))

        r, k, v = (
            g.linear(x, param)
            for x, param in (
                (x_r, block.time_mix_receptance), (x_k, block.time_mix_key), (x_v, block.time_mix_value)
            )
        )  # fmt: skip
        if first:
            v = v + g.mul(first + g.scale(v, -1.0), g.map(low_rank(x_v, "v"), sigmoid))
        decay = g.map(g.scale(g.map(low_rank(x_w, "w"), sigmoid), _DECAY), exp)
        rate = g.map(low_rank(x_a, "a"), sigmoid)

        kappa = g.rms_norm(g.mul(k, block.time_mix_k_k), None, _LENGTH_EPS**2 / c.head_dim, c.head_dim)
        kappa = g.scale(kappa, c.head_dim**-0.5)
        replaced = g.mul(k, block.time_mix_k_a)
        k = k + (g.mul(rate, replaced) + g.scale(replaced, -1.0))
        y = g.linear_state(r, k, v, decay, n_head=c.n_head, a=g.scale(kappa, -1.0), b=g.mul(kappa, rate))
        if block.time_mix_ln and block.time_mix_ln_bias:
            y = g.layer_norm(y, None, _GROUP_NORM_EPS, c.head_dim)
            y = g.add(g.mul(y, block.time_mix_ln), block.time_mix_ln_bias)
        y = y + g.mul(v, dot(g, g.mul(k, block.time_mix_r_k), r, c.head_dim), c.head_dim)
        if x_g:
            y = g.mul(y, g.linear(g.map(g.linear(x_g[0], block.time_mix_g1), sigmoid), block.time_mix_g2))
        return g.linear(y, block.time_mix_output), first or v

    def channel_mix(self, g: Graph, c: RwkvConfig, block: Params, h: Value) -> Value:
        """Network with squared ReLU behind a token shift."""
        mix = block.channel_mix_lerp_k_weight.reshaped(c.n_embd)
        x = h + g.mul(g.short_conv(h, (1.0, -1.0)), mix)
        return g.linear(g.map(g.linear(x, block.channel_mix_key), relu_squared), block.channel_mix_value)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture of this family."""
    register(Rwkv7())


@hookimpl
def register_chat_formats(register):  # type: ignore[no-untyped-def]
    """Register the chat format of this family."""
    for chat_format in FORMATS:
        register(chat_format)
