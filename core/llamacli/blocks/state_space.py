"""State space layers (SSM): state space duality and the selective scan.

Dao and Gu 2024 (arXiv:2405.21060), Gu and Dao 2023 (arXiv:2312.00752). A layer widens its input, convolves it over the
last tokens, lets it pass through a linear recurrence whose step size depends on the token, and gates the result.
"""

from __future__ import annotations

import attrs

from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata
from llamacli.graph import Graph, Value
from llamacli.ops.activations import exp, silu, softplus
from llamacli.tensor_table import Params, TensorTable

_MAX_WIDTH = 1 << 22


@attrs.frozen
class Duality:
    """Sizes of layers of state space duality (SSD), the second generation.

    `n_head` heads, `head_dim` wide, have states of `d_state` rows; `n_group` groups of heads share what is written to
    the state and read from it. The convolution has `n_taps`.
    """

    n_head: int
    head_dim: int
    n_group: int
    d_state: int
    n_taps: int

    @classmethod
    def from_gguf(cls, metadata: Metadata, architecture: str) -> Duality:
        """Read `{architecture}.ssm.*`; ModelFormatError names the key at fault."""
        prefix = f"{architecture}.ssm."
        d_inner = metadata.get_int(prefix + "inner_size", minimum=1, maximum=_MAX_WIDTH)
        n_head = metadata.get_int(prefix + "time_step_rank", minimum=1, maximum=1 << 14)
        n_group = metadata.get_int(prefix + "group_count", minimum=1, maximum=1 << 14)
        if d_inner % n_head or n_head % n_group or d_inner // n_head % 16:
            raise ModelFormatError(
                f"{metadata.source}: {prefix}inner_size = {d_inner}, expected time_step_rank = {n_head} heads that are "
                f"multiples of 16 wide, in group_count = {n_group} groups"
            )
        d_state = metadata.get_int(prefix + "state_size", minimum=1, maximum=1 << 12)
        n_taps = metadata.get_int(prefix + "conv_kernel", minimum=2, maximum=64)
        return cls(n_head, d_inner // n_head, n_group, d_state, n_taps)

    @property
    def d_inner(self) -> int:
        """Width of the layer's values."""
        return self.n_head * self.head_dim

    @property
    def d_conv(self) -> int:
        """Width of the convolution: values, and what writes and reads states."""
        return self.d_inner + 2 * self.n_group * self.d_state

    def add_tensors(self, block: TensorTable, n_embd: int, *, needs_norm: bool = True, needs_bias: bool = True) -> None:
        """Add tensors `ssm_*`; the norm and convolution bias are optional unless needed."""
        block.add("ssm_in", self.d_inner + self.d_conv + self.n_head, n_embd)
        block.add("ssm_conv1d", self.d_conv, self.n_taps, bias=True, needs_bias=needs_bias)
        block.add_tensor("ssm_dt.bias", self.n_head)
        block.add_tensor("ssm_a", self.n_head, 1)
        block.add_tensor("ssm_d", self.n_head, 1)
        block.add("ssm_norm", self.n_group, self.d_inner // self.n_group, optional=not needs_norm)
        block.add("ssm_out", n_embd, self.d_inner)

    def layer(self, g: Graph, block: Params, h: Value, eps: float) -> Value:
        """Record the layer on normalised input.

        For each head, with step size dt = softplus(linear + bias): S = exp(dt a) S + B (dt x)^T, y = S^T C + d x. The
        result is gated by silu, normalised by group and projected.
        """
        n_state = self.n_group * self.d_state
        mixed = g.linear(h, block.ssm_in)
        gate = g.columns(mixed, 0, self.d_inner)
        step = g.columns(mixed, self.d_inner + self.d_conv, self.n_head)
        step = g.map(g.add(step, block.ssm_dt_bias), softplus)
        convolved = g.map(g.short_conv(g.columns(mixed, self.d_inner, self.d_conv), block.ssm_conv1d), silu)
        x = g.columns(convolved, 0, self.d_inner)
        write, read = (g.columns(convolved, self.d_inner + first, n_state) for first in (0, n_state))
        decay = g.map(g.mul(step, block.ssm_a.reshaped(self.n_head)), exp)
        y = g.linear_state(read, write, g.mul(x, step, self.head_dim), decay, n_head=self.n_head, n_head_k=self.n_group)
        y = g.swiglu(gate, g.add(y, g.mul(x, block.ssm_d.reshaped(self.n_head), self.head_dim)))
        if block.ssm_norm:
            y = g.rms_norm(y, block.ssm_norm, eps, self.d_inner // self.n_group)
        return g.linear(y, block.ssm_out)


@attrs.frozen
class SelectiveScan:
    """Sizes of layers of the selective scan (S6), the first generation.

    Each of `d_inner` columns has a state of `d_state` numbers, with a decay of its own; step sizes come from `dt_rank`
    numbers. The convolution has `n_taps`. With `normalizes`, step sizes and what writes and reads the state are
    normalised (RMS); without weights unless the layer has them.
    """

    d_inner: int
    d_state: int
    dt_rank: int
    n_taps: int
    normalizes: bool = False

    @classmethod
    def from_gguf(cls, metadata: Metadata, architecture: str) -> SelectiveScan:
        """Read `{architecture}.ssm.*`; ModelFormatError names the key at fault."""
        prefix = f"{architecture}.ssm."
        d_inner = metadata.get_int(prefix + "inner_size", minimum=1, maximum=_MAX_WIDTH)
        if d_inner % 16:
            raise ModelFormatError(f"{metadata.source}: {prefix}inner_size = {d_inner}, expected a multiple of 16")
        return cls(
            d_inner,
            metadata.get_int(prefix + "state_size", minimum=1, maximum=1 << 12),
            metadata.get_int(prefix + "time_step_rank", minimum=1, maximum=1 << 16),
            metadata.get_int(prefix + "conv_kernel", minimum=2, maximum=64),
            metadata.get_bool(prefix + "dt_b_c_rms", default=False),
        )

    def add_tensors(self, block: TensorTable, n_embd: int, *, has_norms: bool = False) -> None:
        """Add the tensors `ssm_*` of a layer; `has_norms` adds those of norms."""
        block.add("ssm_in", 2 * self.d_inner, n_embd)
        block.add("ssm_conv1d", self.d_inner, self.n_taps, needs_bias=True)
        block.add("ssm_x", self.dt_rank + 2 * self.d_state, self.d_inner)
        block.add("ssm_dt", self.d_inner, self.dt_rank, needs_bias=True)
        block.add_tensor("ssm_a", self.d_inner, self.d_state)
        block.add_tensor("ssm_d", self.d_inner)
        block.add("ssm_out", n_embd, self.d_inner)
        if has_norms:
            block.add("ssm_dt_norm", self.dt_rank)
            block.add("ssm_b_norm", self.d_state)
            block.add("ssm_c_norm", self.d_state)

    def layer(self, g: Graph, block: Params, h: Value, eps: float, *, has_norms: bool = False) -> Value:
        """Record the layer on normalised input.

        For each column, with step size dt = softplus(linear + bias): s = exp(dt a) s + B dt x, y = C s + d x. The
        result is gated by silu and projected.
        """
        mixed = g.linear(h, block.ssm_in)
        gate = g.columns(mixed, self.d_inner, self.d_inner)
        x = g.map(g.short_conv(g.columns(mixed, 0, self.d_inner), block.ssm_conv1d), silu)
        parts = g.linear(x, block.ssm_x)
        step = g.columns(parts, 0, self.dt_rank)
        write, read = (g.columns(parts, self.dt_rank + first, self.d_state) for first in (0, self.d_state))
        if has_norms:
            step = g.rms_norm(step, block.ssm_dt_norm, eps)
            write, read = g.rms_norm(write, block.ssm_b_norm, eps), g.rms_norm(read, block.ssm_c_norm, eps)
        elif self.normalizes:
            step, write, read = (g.rms_norm(part, None, eps) for part in (step, write, read))
        step = g.map(g.linear(step, block.ssm_dt), softplus)
        y = g.linear_state(read, write, g.mul(step, x), step, n_head=1, rates=block.ssm_a)
        y = g.swiglu(gate, g.add(y, g.mul(x, block.ssm_d)))
        return g.linear(y, block.ssm_out)
