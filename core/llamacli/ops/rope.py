"""Rotary position embedding: which angle each pair of a head is turned by at each position.

Source: Su et al. 2021 (RoPE), Peng et al. 2023 (YaRN). Angles are formed in float32 in the order that GGML forms
them, since at long positions the rounding of the angle is what two implementations differ by first.
"""

from __future__ import annotations

import math

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata

SCALING_TYPES = ("none", "linear", "yarn", "longrope")
"""How positions beyond the trained ones are dealt with. LongRoPE is `factors` that a family picks, scaled linearly."""


@attrs.frozen
class Rope:
    """One RoPE variant.

    `n_dims` of each head are turned (the rest pass through), in `n_dims / 2` pairs: neighbours `(2i, 2i+1)` when
    `interleaved`, halves `(i, i + n_dims/2)` otherwise. `freq_scale` divides positions (linear scaling: 1/factor).
    YaRN mixes scaled and unscaled angles by `ext_factor` between the pairs that `beta_fast` and `beta_slow` turns over
    `n_ctx_orig` tokens mark out; `attn_factor` multiplies cosine and sine.
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

    @classmethod
    def from_gguf(cls, metadata: Metadata, architecture: str, head_dim: int, *, interleaved: bool) -> Rope:
        """Read the `{architecture}.rope.*` keys; `head_dim` is the default of `rope.dimension_count`.

        Raises ModelFormatError naming the key that is of a wrong type, out of range or unknown.
        """
        prefix = f"{architecture}.rope."
        n_dims = metadata.get_int(f"{prefix}dimension_count", default=head_dim, minimum=2, maximum=head_dim)
        if n_dims % 2:
            raise ModelFormatError(
                f"{metadata.source}: {prefix}dimension_count = {n_dims} is odd, and pairs of dimensions are turned"
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
        self, start: int, n: int, factors: npt.NDArray[np.float32] | None = None
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Cosines and sines, float32 [n, n_dims/2] each, of positions `start` to `start + n - 1`.

        `factors`, float32 [n_dims/2], divide the frequency of each pair (`rope_freqs` of a GGUF file).
        """
        pairs = self.n_dims // 2
        angles = np.empty((n, pairs), np.float32)
        angle = np.arange(start, start + n, dtype=np.float32)
        step = np.float32(self.base) ** np.float32(-2.0 / self.n_dims)
        for pair in range(pairs):
            angles[:, pair] = angle
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
        return np.cos(angles) * magnitude, np.sin(angles) * magnitude

    def _yarn_ramp(self) -> npt.NDArray[np.float32]:
        """float32 [n_dims/2]: the share of the unscaled angle, 1 for fast pairs and 0 for slow ones."""

        def pair_of(turns: float) -> float:
            return self.n_dims * math.log(self.n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low = max(0.0, math.floor(pair_of(self.beta_fast)))
        high = min(self.n_dims - 1.0, math.ceil(pair_of(self.beta_slow)))
        pairs = np.arange(self.n_dims // 2, dtype=np.float32)
        ramp = np.clip((pairs - np.float32(low)) / np.float32(max(0.001, high - low)), 0, 1)
        return ((1 - ramp) * np.float32(self.ext_factor)).astype(np.float32)
