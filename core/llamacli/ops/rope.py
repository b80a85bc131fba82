"""Rotary position embedding (RoPE).

Pairs of a head are rotated by angles that grow with the position.

Source: Su et al. 2021 (RoPE), Peng et al. 2023 (YaRN). Angles are formed in float32 in the order that GGML forms them,
since at long positions the rounding of the angle is the first difference between two implementations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata
from llamacli.inputs import N_COMPONENTS
from llamacli.kernels.layout import ROW, RUN, record
from llamacli.kv.layout import N_BATCH
from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.key_shift import Keys, KeyShift
from llamacli.ops.lowering import NO_LIMIT, Lowering, Step, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

Floats = npt.NDArray[np.float32]

SCALING_TYPES = ("none", "linear", "yarn", "longrope")
"""Methods of context extension. LongRoPE is `factors` that a family picks, scaled linearly."""


@attrs.frozen
class Rope:
    """RoPE variant: dimensions, frequencies and scaling.

    `n_dims` of each head, from dimension `first` on, are rotated (the rest pass through), in `n_dims / 2` pairs:
    neighbours `(2i, 2i+1)` when `interleaved`, halves `(i, i + n_dims/2)` otherwise. `freq_scale` divides positions
    (linear scaling: 1/factor). YaRN mixes scaled and unscaled angles by `ext_factor` between the pairs that make
    `beta_fast` and `beta_slow` rotations over `n_ctx_orig` tokens; `attn_factor` multiplies cosine and sine.

    `components`, one a pair, make it multimodal RoPE (M-RoPE, Wang et al. 2024): the pair's angle is that of the first
    (time), second (height), third (width) or fourth of a token's positions, numbers 0 to 3. On text the first three are
    equal and the fourth is 0. With `axial`, the frequencies begin anew with each component, as if its pairs were all
    (2D RoPE of vision transformers, Heo et al. 2024).

    `offset` is added to positions. With `inverse`, pairs are rotated back.
    """

    n_dims: int
    interleaved: bool
    base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    first: int = 0
    components: tuple[int, ...] = ()
    axial: bool = False
    offset: int = 0
    inverse: bool = False

    @classmethod
    def from_gguf(cls, metadata: Metadata, architecture: str, head_dim: int, *, interleaved: bool) -> Rope:
        """Read the `{architecture}.rope.*` keys; `head_dim` is the default of `rope.dimension_count`.

        Raises ModelFormatError naming the key that is of a wrong type, out of range or unknown.
        """
        prefix = f"{architecture}.rope."
        n_dims = metadata.get_int(f"{prefix}dimension_count", default=head_dim, minimum=2, maximum=head_dim)
        if n_dims % 2:
            raise ModelFormatError(
                f"{metadata.source}: {prefix}dimension_count = {n_dims} is odd, expected an even number"
            )
        base = metadata.get_float(f"{prefix}freq_base", default=10000.0, minimum=2.0)
        kind = metadata.get_str(f"{prefix}scaling.type", default="linear")
        if kind not in SCALING_TYPES:
            raise ModelFormatError(
                f"{metadata.source}: {prefix}scaling.type = {kind!r} is not one of {', '.join(SCALING_TYPES)}"
            )
        legacy = metadata.get_float(f"{prefix}scale_linear", default=0.0, minimum=0.0)
        factor = metadata.get_float(f"{prefix}scaling.factor", default=legacy, minimum=0.0) or 1.0
        attn_factor = metadata.get_float(f"{prefix}scaling.attn_factor", default=1.0)
        trained = metadata.get_int(f"{architecture}.context_length", minimum=1)
        yarn = kind == "yarn"
        return cls(
            n_dims=n_dims,
            interleaved=interleaved,
            base=base,
            freq_scale=1.0 if kind == "none" else 1.0 / factor,
            ext_factor=1.0 if yarn else 0.0,
            attn_factor=attn_factor,
            beta_fast=metadata.get_float(f"{prefix}scaling.yarn_beta_fast", default=32.0, minimum=1e-3),
            beta_slow=metadata.get_float(f"{prefix}scaling.yarn_beta_slow", default=1.0, minimum=1e-3),
            n_ctx_orig=metadata.get_int(f"{prefix}scaling.original_context_length", default=trained, minimum=1),
        )

    def table(
        self, positions: npt.ArrayLike, factors: npt.NDArray[np.float32] | None = None
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Cosines and sines, float32 [n, n_dims/2] each, of positions.

        These are [n], or [n, 4] where there are `components`. `factors`, float32 [n_dims/2], divide the frequency of
        each pair (`rope_freqs` of a GGUF file).
        """
        given = np.asarray(positions)
        angle = (given[:, None] if given.ndim == 1 else given).astype(np.float32) + np.float32(self.offset)
        if self.components and angle.shape[1] == 1:  # of text
            angle = angle * np.array([1, 1, 1, 0], np.float32)
        pairs = self.n_dims // 2
        angles = np.empty((len(angle), pairs), np.float32)
        first, n_turns = angle, len({*self.components}) if self.axial else 1
        step = np.float32(self.base) ** np.float32(-2.0 * n_turns / self.n_dims)
        for pair in range(pairs):
            component = self.components[pair] if self.components else 0
            if self.axial and component not in self.components[:pair]:
                angle = first
            angles[:, pair] = angle[:, component]
            angle = angle * step
        if factors is not None:
            angles /= factors
        scaled = np.float32(self.freq_scale) * angles
        if self.ext_factor:
            ramp = self._yarn_ramp()
            angles = scaled * (1 - ramp) + angles * ramp
        else:
            angles = scaled
        magnitude = np.float32(self.attn_factor)
        if self.ext_factor and self.freq_scale < 1:
            magnitude *= np.float32(1 - 0.1 * math.log(self.freq_scale))  # YaRN's attention temperature
        return np.cos(angles) * magnitude, np.sin(angles) * (-magnitude if self.inverse else magnitude)

    def _yarn_ramp(self) -> npt.NDArray[np.float32]:
        """YaRN ramp: share of the unscaled angle, float32 [n_dims/2].

        1 for fast pairs and 0 for slow ones.
        """

        def pair_of(rotations: float) -> float:
            return self.n_dims * math.log(self.n_ctx_orig / (rotations * 2 * math.pi)) / (2 * math.log(self.base))

        low = max(0.0, math.floor(pair_of(self.beta_fast)))
        high = min(self.n_dims - 1.0, math.ceil(pair_of(self.beta_slow)))
        pairs = np.arange(self.n_dims // 2, dtype=np.float32)
        ramp = np.clip((pairs - np.float32(low)) / np.float32(max(0.001, high - low)), 0, 1)
        return ((1 - ramp) * np.float32(self.ext_factor)).astype(np.float32)


class RopeTable:
    """Cosines and sines of positions: all so far, and a batch's jumps.

    `steps` are the steps whose parameters point to them.
    """

    def __init__(self, rope: Rope, factors: Floats | None, prefix: str, memory: Callable[[Floats], Floats]):
        self._rope, self._factors, self._memory = rope, factors, memory
        self._alive: list[list[Floats]] = []
        self._fields = f"{prefix}cos", f"{prefix}sin"
        self._tables: list[Floats] = [np.empty((0, rope.n_dims // 2), np.float32)] * 2
        self._jumps: list[Floats] = []
        self.steps: list[Step] = []

    def reach(self, n: int) -> int:
        """Extend the tables to the first n positions, or more.

        Returns how many they have.
        """
        known = len(self._tables[0])
        if n <= known:
            return known
        more = self._rope.table(np.arange(known, max(n, 2 * known, 256)), self._factors)
        tables = [self._memory(np.concatenate(parts)) for parts in zip(self._tables, more, strict=True)]
        self._alive.append(tables)  # an interrupt may leave some steps with these, and some with those before
        self._point(tables, "")
        self._tables = tables
        return len(tables[0])

    def jump(self, positions: npt.NDArray[np.int32]) -> None:
        """Compute cosines and sines of positions, int32 [m, 1 or 4].

        They are at most N_BATCH, but for pictures.
        """
        if not self._jumps or len(self._jumps[0]) < len(positions):
            empty = np.zeros((max(N_BATCH, len(positions)), self._rope.n_dims // 2), np.float32)
            jumps = [self._memory(empty), self._memory(empty.copy())]
            self._alive.append(jumps)
            self._point(jumps, "jump_")
            self._jumps = jumps
        for table, values in zip(self._jumps, self._rope.table(positions, self._factors), strict=True):
            table[: len(positions)] = values

    def _point(self, tables: Sequence[Floats], kind: str) -> None:
        for step in self.steps:
            for field, table in zip(self._fields, tables, strict=True):
                step.params[f"{kind}{field}"] = table.ctypes.data


ROTATE = record(
    "x", "out", "stride", "n_heads", "head_dim", "first", "n_dims", "first_step", "second", "cos", "sin", "long_from",
    "long_cos", "long_sin", "jump_cos", "jump_sin", "jump_long_cos", "jump_long_sin",
)  # fmt: skip
"""Sequences created for `long_from` tokens or more use the long cosines and sines. A row with a `jump` uses row
`jump` - 1 of the jump ones."""

_TABLES: dict[str, Any] = dict.fromkeys(name for name in ROTATE.names or () if name.endswith(("cos", "sin")))
"""Fields that RopeTable sets."""


@attrs.frozen(eq=False)
class Rotate(Op):
    """out = x with each head of `head_dim` rotated by its token's position.

    `long_factors` replace `factors` in sequences that are created for more than `rope.n_ctx_orig` tokens.
    """

    uses_position = True

    x: Value
    rope: Rope
    factors: Tensor | None
    long_factors: Tensor | None
    head_dim: int

    @property
    def n_components(self) -> int:
        return N_COMPONENTS if self.rope.components else 1

    def context_lengths(self) -> list[int]:
        return [self.rope.n_ctx_orig] if self.long_factors else []

    def compute(self, run: Run) -> Array:
        factors = self._factors(run.sequence.seq_len)
        known = None if factors is None else run[factors].astype(np.float32)[: self.rope.n_dims // 2]
        cos, sin = self.rope.table(run.components, known)
        return self._rotated(run[self.x].reshape(run.n, -1, self.head_dim), cos[:, None], sin[:, None]).reshape(
            run.n, -1
        )

    def shift_keys(self, keys: Keys, shift: KeyShift) -> Keys | None:
        # Keys are rotated back by the distance; the magnitude that RoPE gave them is kept.
        if shift.of(self.x, keys, shift.is_normed) is not keys:
            return None
        tensor = self._factors(shift.seq_len)
        factors = None if tensor is None else shift.weight(tensor)[: self.rope.n_dims // 2].copy()
        rope = attrs.evolve(self.rope, offset=0)
        cos, sin = rope.table([shift.by], factors)
        magnitude = rope.table([0])[0][0, 0]
        heads = np.moveaxis(keys, 1, 2)
        return np.ascontiguousarray(np.moveaxis(self._rotated(heads, cos / magnitude, -sin / magnitude), 2, 1))

    def _factors(self, seq_len: int) -> Tensor | None:
        return self.long_factors if self.long_factors and seq_len > self.rope.n_ctx_orig else self.factors

    def _rotated(self, heads: npt.NDArray[Any], cos: Floats, sin: Floats) -> npt.NDArray[Any]:
        """Rotate `n_dims` of the last axis.

        Pairs are neighbours or halves, as the variant says.
        """
        heads = heads.copy()
        rotated = heads[..., self.rope.first : self.rope.first + self.rope.n_dims]
        half = self.rope.n_dims // 2
        first = slice(0, 2 * half, 2) if self.rope.interleaved else slice(half)
        second = slice(1, 2 * half, 2) if self.rope.interleaved else slice(half, 2 * half)
        a, b = rotated[..., first].copy(), rotated[..., second].copy()
        rotated[..., first] = a * cos - b * sin
        rotated[..., second] = a * sin + b * cos
        return heads

    def lower(self, to: Lowering) -> None:
        # The tables of cosines and sines are shared by all steps of one variant.
        rope, x, out = self.rope, f32(self.x), f32(self.out)
        first_step, second = (2, 1) if rope.interleaved else (1, rope.n_dims // 2)
        made = to.maker(x)
        step = to.step(
            rotate_kernel(), ROTATE, x=x, out=out, n_heads=x.width // self.head_dim, head_dim=self.head_dim,
            first=rope.first, n_dims=rope.n_dims, first_step=first_step, second=second,
            long_from=rope.n_ctx_orig + 1 if self.long_factors else NO_LIMIT,
            **_TABLES, follows=made if made is not None and made.work_unit == self.head_dim else None,
        )  # fmt: skip
        variants = {"": self.factors} | ({"long_": self.long_factors} if self.long_factors else {})
        for prefix, factors in variants.items():
            to.shared((rope, factors, prefix), functools.partial(_new_table, to, rope, factors, prefix)).steps.append(
                step
            )

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield rope(g, x, Rope(8, interleaved=True), 16)
        yield rope(g, x, Rope(16, interleaved=False), 16, param("rope_freqs", 8))
        yield rope(g, x, Rope(6, interleaved=False, first=4), 16)
        yield rope(g, x, Rope(8, interleaved=False, components=(0, 1, 2, 3)), 16)
        yield rope(g, x, Rope(16, interleaved=False, components=(1, 1, 1, 1, 2, 2, 2, 2), axial=True), 16)
        yield rope(g, x, Rope(8, interleaved=True, first=8, offset=-3, inverse=True), 16)


def _new_table(to: Lowering, rope: Rope, factors: Tensor | None, prefix: str) -> RopeTable:
    table = RopeTable(rope, to.vector(factors)[: rope.n_dims // 2] if factors else None, prefix, to.memory)
    to.before_run(table.reach)
    to.before_jump(table.jump)
    return table


def rope(
    g: Recorder, x: Value, rope: Rope, head_dim: int, factors: Param | None = None, long_factors: Param | None = None
) -> Value:
    """Rotate every head of x by its token's position.

    `factors` divide the frequency of each pair. `long_factors` replace them in sequences created for more than
    `rope.n_ctx_orig` tokens (LongRoPE, Ding et al. 2024).

    Formula: `(a, b) = (a * cos(t) - b * sin(t), a * sin(t) + b * cos(t))` for each pair i of a head, with
        `t = position * freq_scale * base^(-2i / n_dims) / factors[i]`; YaRN mixes scaled and unscaled t, and multiplies
        both results by its magnitude
    Shapes: x [n, n_heads * head_dim], factors (n_dims / 2,) or longer; out as x
    Limits: n_dims is even and at most head_dim; the other dimensions pass through
    Example: `q = g.rope(q, config.rope, config.head_dim, weights.rope_freqs)`
    """
    fits = 0 <= rope.first < rope.first + rope.n_dims <= head_dim and x.width % head_dim == 0 and rope.n_dims % 2 == 0
    expect("rope", fits, f"{rope.n_dims} dimensions from {rope.first} of head_dim {head_dim} on width {x.width}")
    normal, long = (param.weight if param else None for param in (factors, long_factors))
    components = rope.components or (0,) * (rope.n_dims // 2)
    whole = len(components) == rope.n_dims // 2 and {*components} <= {*range(N_COMPONENTS)}
    expect("rope", whole, f"position components {components} of {rope.n_dims // 2} pairs")
    in_order = not rope.axial or sorted(components, key=components.index) == [*components]
    even = not rope.axial or len({components.count(one) for one in components}) == 1
    expect("rope", in_order and even, f"axial frequencies and position components {components}")
    for weight in filter(None, (normal, long)):
        expect("rope", weight.shape[-1] >= rope.n_dims // 2, f"{weight.name} and {rope.n_dims} dimensions")
    return g.record(Rotate(g.value(x.width), x, rope, normal, long, head_dim))


@functools.cache
def rotate_kernel() -> Kernel:
    """Compiled kernel; a head is a unit of work.

    Pair i is elements `i * first_step` and `i * first_step + second` of a head.
    """
    from llamacli.kernels.api import Kernel, carray, pointer, share

    def rotate(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, ROTATE)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share((r.n_rows - r.first_row) * a.n_heads, thread, n_threads)
        pairs = a.n_dims // 2
        for unit in range(first, last):
            row, head = r.first_row + unit // a.n_heads, unit % a.n_heads
            place = row * a.stride + 4 * head * a.head_dim
            x = carray(pointer(a.x + place), a.head_dim, np.float32)
            out = carray(pointer(a.out + place), a.head_dim, np.float32)
            token = carray(pointer(r.rows), r.n_rows, ROW)[row]
            is_long = token.seq_len >= a.long_from
            cosines, sines = (a.long_cos, a.long_sin) if is_long else (a.cos, a.sin)
            angle = 4 * token.position * pairs
            if token.jump:
                cosines, sines = (a.jump_long_cos, a.jump_long_sin) if is_long else (a.jump_cos, a.jump_sin)
                angle = 4 * (token.jump - 1) * pairs
            cos = carray(pointer(cosines + angle), pairs, np.float32)
            sin = carray(pointer(sines + angle), pairs, np.float32)
            for i in range(a.first):
                out[i] = x[i]
            for i in range(pairs):
                at = a.first + i * a.first_step
                u, v = x[at], x[at + a.second]
                out[at] = u * cos[i] - v * sin[i]
                out[at + a.second] = u * sin[i] + v * cos[i]
            for i in range(a.first + a.n_dims, a.head_dim):
                out[i] = x[i]

    return Kernel(rotate)
