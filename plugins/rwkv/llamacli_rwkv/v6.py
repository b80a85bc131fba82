"""RWKV-6 (Finch) and QRWKV-6.

Qwen 2.5 with its time mix in place of attention. Peng et al. 2024 (arXiv:2404.05892), Recursal AI 2025. How much of the
token before is mixed into this one depends on both, by a low-rank projection; the state decays by a number a channel
that depends on the token.
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
    add_network,
    exp,
    hookimpl,
    network,
    relu_squared,
    sigmoid,
    silu,
    tanh,
)

LLAMACLI_API = 1

_GROUP_NORM_EPS = 64e-5
_MIXED = ("w", "k", "v", "r", "g")


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Rwkv6Config(Config):
    """Hyperparameters of RWKV-6.

    Mixes and decays have low ranks. Every `rescale` layers the hidden state is halved, 0 never.
    """

    mix_rank: int
    decay_rank: int
    rescale: int


class Rwkv6(Architecture):
    """`general.architecture = rwkv6`."""

    name = "rwkv6"
    n_shift = 2

    def configure(self, metadata: Metadata) -> Rwkv6Config:
        """Read the hyperparameters; files count 0 heads of attention."""

        def count(key: str, minimum: int, maximum: int, **default: int) -> int:
            return metadata.get_int(f"{self.name}.{key}", minimum=minimum, maximum=maximum, **default)

        head_dim, n_embd = count("wkv.head_size", 1, 1 << 10), count("embedding_length", 1, 1 << 20)
        if n_embd % head_dim or head_dim % 16:
            raise ModelFormatError(
                f"{metadata.source}: {self.name}.wkv.head_size = {head_dim}, expected a multiple of 16 that divides "
                f"{self.name}.embedding_length = {n_embd}"
            )
        count("attention.head_count", 0, 1 << 14, default=0)
        count("token_shift_count", self.n_shift, self.n_shift, default=self.n_shift)
        n_head = n_embd // head_dim
        return Rwkv6Config.from_gguf(
            metadata,
            n_head=n_head,
            n_head_kv=count("attention.head_count_kv", 0, n_head, default=0) or n_head,
            head_dim=head_dim,
            mix_rank=count("time_mix_extra_dim", 1, 1 << 20),
            decay_rank=count("time_decay_extra_dim", 1, 1 << 20),
            rescale=count("rescale_every_n_layers", 0, 1 << 10, default=0),
            **self.epsilon(metadata),
        )

    def epsilon(self, metadata: Metadata) -> dict[str, float]:
        """Field of the epsilon of the norms."""
        return {
            "layer_norm_eps": metadata.get_float(f"{self.name}.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0)
        }

    def tensors(self, config: Rwkv6Config) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        self.add_outer(table, c)
        table.add("output", c.n_vocab, c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            self.add_mix(block, c, c.n_head_kv * c.head_dim)
            self.add_block(block, c)
        return table

    def add_outer(self, table: TensorTable, c: Rwkv6Config) -> None:
        """Norms of embeddings and of the hidden state."""
        table.add("token_embd_norm", c.n_embd, needs_bias=True)
        table.add("output_norm", c.n_embd, needs_bias=True)

    def add_mix(self, block: TensorTable, c: Rwkv6Config, n_kv: int) -> None:
        """Tensors of the time mix."""
        n = c.n_embd
        block.add("attn_norm", n, needs_bias=self.n_shift == 2)
        block.add_tensor("time_mix_lerp_x.weight", 1, 1, n)
        block.add_tensor("time_mix_lerp_fused.weight", 5, 1, 1, n)
        block.add("time_mix_w1", 5 * c.mix_rank, n)
        block.add("time_mix_w2", 5, n, c.mix_rank)
        block.add("time_mix_decay", n)
        block.add("time_mix_decay_w1", c.decay_rank, n)
        block.add("time_mix_decay_w2", n, c.decay_rank)
        for name, n_out in (("key", n_kv), ("value", n_kv), ("receptance", n)):
            block.add(f"time_mix_{name}", n_out, n, bias=self.n_shift == 1)
        block.add("time_mix_gate", n, n)
        block.add("time_mix_output", n, n)

    def add_block(self, block: TensorTable, c: Rwkv6Config) -> None:
        """Tensors of norms and of the channel mix."""
        n = c.n_embd
        for letter in _MIXED:
            block.add_tensor(f"time_mix_lerp_{letter}.weight", 1, 1, n)
        block.choose(["time_mix_lerp_fused"], [f"time_mix_lerp_{letter}" for letter in _MIXED])
        block.add("time_mix_first", c.n_head, c.head_dim)
        block.add("time_mix_ln", n)
        block.add_tensor("time_mix_ln.bias", n)
        block.add("attn_norm_2", n, needs_bias=True)
        block.add_tensor("channel_mix_lerp_k.weight", 1, 1, n)
        block.add_tensor("channel_mix_lerp_r.weight", 1, 1, n)
        block.add("channel_mix_key", c.n_ff, n)
        block.add("channel_mix_value", n, c.n_ff)
        block.add("channel_mix_receptance", n, n)

    def forward(self, g: Graph, config: Rwkv6Config, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.layer_norm(g.embed(w.token_embd), w.token_embd_norm, c.layer_norm_eps)
        for i, block in enumerate(w.blk):
            x = x + self.time_mix(g, c, block, g.layer_norm(x, block.attn_norm, c.layer_norm_eps))
            x = x + self.channel_mix(g, c, block, g.layer_norm(x, block.attn_norm_2, c.layer_norm_eps))
            if c.rescale and (i + 1) % c.rescale == 0:
                x = g.scale(x, 0.5)
        return g.linear(g.layer_norm(x, w.output_norm, c.layer_norm_eps), w.output)

    def time_mix(self, g: Graph, c: Rwkv6Config, block: Params, h: Value) -> Value:
        """Mix tokens.

        For each head S = diag(w) S + k v^T, y = (S before + diag(first) k v^T)^T r.
        """
        x_w, x_k, x_v, x_r, x_g = self.mixes(g, c, block, h)
        r, k, v = (
            g.linear(x, param)
            for x, param in ((x_r, block.time_mix_receptance), (x_k, block.time_mix_key), (x_v, block.time_mix_value))
        )
        decay = g.linear(g.map(g.linear(x_w, block.time_mix_decay_w1), tanh), block.time_mix_decay_w2)
        decay = g.map(g.scale(g.map(g.add(decay, block.time_mix_decay), exp), -1.0), exp)
        y = self.recur(g, c, block, (r, k, v), decay)
        return g.linear(g.mul(y, g.map(g.linear(x_g, block.time_mix_gate), self.gate)), block.time_mix_output)

    gate = staticmethod(silu)

    def recur(self, g: Graph, c: Rwkv6Config, block: Params, rkv: tuple[Value, Value, Value], decay: Value) -> Value:
        """Recurrence, and the norm of its heads."""
        y = g.linear_state(*rkv, decay, n_head=c.n_head, bonus=block.time_mix_first)
        y = g.layer_norm(y, None, _GROUP_NORM_EPS, c.head_dim)
        return g.add(g.mul(y, block.time_mix_ln), block.time_mix_ln_bias)

    def mixes(self, g: Graph, c: Rwkv6Config, block: Params, h: Value) -> list[Value]:
        """Mixes of a token and the one before.

        For decays, keys, values, receptances and gates.
        """
        shift, n = g.short_conv(h, (1.0, -1.0)), c.n_embd  # the token before, minus this one
        x = h + g.mul(shift, block.time_mix_lerp_x_weight.reshaped(n))
        by = g.batched_linear(g.map(g.linear(x, block.time_mix_w1), tanh), block.time_mix_w2)
        fused = block.time_mix_lerp_fused_weight
        if fused:
            parts = fused.reshaped(5, 1, n)
            lerps = [parts.matrix(i).reshaped(n) for i in range(5)]
        else:
            lerps = [getattr(block, f"time_mix_lerp_{letter}_weight").reshaped(n) for letter in _MIXED]
        return [h + g.mul(shift, g.add(g.columns(by, i * n, n), lerp)) for i, lerp in enumerate(lerps)]

    def channel_mix(self, g: Graph, c: Rwkv6Config, block: Params, h: Value) -> Value:
        """Gated network with squared ReLU behind a token shift."""
        shift, n = g.short_conv(h, (1.0, -1.0)), c.n_embd
        lerps = (block.channel_mix_lerp_k_weight, block.channel_mix_lerp_r_weight)
        x_k, x_r = (h + g.mul(shift, lerp.reshaped(n)) for lerp in lerps)
        k = g.linear(g.map(g.linear(x_k, block.channel_mix_key), relu_squared), block.channel_mix_value)
        return g.mul(k, g.map(g.linear(x_r, block.channel_mix_receptance), sigmoid))


class Rwkv6Qwen2(Rwkv6):
    """`general.architecture = rwkv6qwen2`: RMSNorm and SwiGLU of Qwen, keys and values of fewer heads."""

    name = "rwkv6qwen2"
    n_shift = 1
    gate = staticmethod(sigmoid)

    def epsilon(self, metadata: Metadata) -> dict[str, float]:
        """Field of the epsilon of the norms."""
        return {
            "rms_eps": metadata.get_float(f"{self.name}.attention.layer_norm_rms_epsilon", minimum=0.0, maximum=1.0)
        }

    def add_outer(self, table: TensorTable, c: Rwkv6Config) -> None:
        """Norm of the hidden state."""
        table.add("output_norm", c.n_embd, bias=True)

    def add_block(self, block: TensorTable, c: Rwkv6Config) -> None:
        """Tensors of the network."""
        block.add("ffn_norm", c.n_embd)
        add_network(block, c, c.n_ff)

    def forward(self, g: Graph, config: Rwkv6Config, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            x = x + self.time_mix(g, c, block, g.rms_norm(x, block.attn_norm, c.rms_eps))
            x = x + network(g, block, g.rms_norm(x, block.ffn_norm, c.rms_eps))
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)

    def recur(self, g: Graph, c: Rwkv6Config, block: Params, rkv: tuple[Value, Value, Value], decay: Value) -> Value:
        """Gated linear attention.

        Keys are the smaller, the slower they decay.
        """
        r, k, v = rkv
        times = c.n_head // c.n_head_kv
        if times > 1:
            k, v = (g.repeat(x, c.head_dim, times, tiled=False) for x in (k, v))
        k = k + g.scale(g.mul(k, decay), -1.0)
        return g.linear_state(r, k, v, decay, n_head=c.n_head, scale=c.head_dim**-0.5)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures."""
    register(Rwkv6())
    register(Rwkv6Qwen2())
