"""Multimodal RoPE (M-RoPE) at positions of text.

Wang et al. 2024 (Qwen2-VL, arXiv:2409.12191), Bai et al. 2025 (Qwen3-VL, arXiv:2511.21631). The pairs of a head are
divided into sections for time, height, width and one more position. On text the first three positions are the token's
and the fourth is 0, so that RoPE is the ordinary one, except that pairs of the fourth section are not rotated.
"""

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.plugin import Metadata, ModelFormatError, Rope

Floats = npt.NDArray[np.float32]


@attrs.frozen
class TextMRope(Rope):
    """RoPE by halves in which the pairs `fixed` are not rotated."""

    fixed: tuple[int, ...] = ()

    def table(self, start: int, n: int, factors: Floats | None = None) -> tuple[Floats, Floats]:
        """See Rope.

        The angle of a fixed pair is 0 at all positions.
        """
        cos, sin = super().table(start, n, factors)
        fixed = list(self.fixed)
        cos[:, fixed], sin[:, fixed] = super().table(0, 1, factors)[0][:, fixed], 0
        return cos, sin

    @classmethod
    def from_sections(
        cls, metadata: Metadata, architecture: str, head_dim: int, *, alternate: bool, partial: bool = False
    ) -> "TextMRope":
        """Read `{architecture}.rope.*`, `dimension_sections` included.

        Sections follow each other (Qwen2-VL) or `alternate` pair by pair (Qwen3-VL). Only with `partial` may a part of
        each head be rotated. Raises ModelFormatError naming
        the key that is of a wrong type, out of range or unknown.
        """
        rope = Rope.from_gguf(metadata, architecture, head_dim, interleaved=False)
        prefix = f"{metadata.source}: {architecture}.rope."
        if rope.n_dims != head_dim and not partial:
            raise ModelFormatError(f"{prefix}dimension_count = {rope.n_dims}, expected the head width {head_dim}")
        sections = metadata.get_ints(f"{architecture}.rope.dimension_sections", 4, minimum=0, maximum=head_dim)
        if not any(sections[:3]) or sum(sections) > head_dim:
            raise ModelFormatError(
                f"{prefix}dimension_sections = {list(sections)}, expected a sum of at most the head width {head_dim} "
                "and one of the first three above 0"
            )
        rotated = _alternating_pairs(sections) if alternate else set(range(sum(sections[:3])))
        fixed = tuple(i for i in range(rope.n_dims // 2) if i % sum(sections) not in rotated)
        return cls(**attrs.asdict(rope), fixed=fixed)


def _alternating_pairs(sections: tuple[int, ...]) -> set[int]:
    """Pairs of the first three sections where these alternate.

    Their order is t, h, w, t, h, w, and so on. A section that is shorter than the first has gaps at the end, and the
    pairs there are in no section. With 24, 20 and 20 pairs these are 61 and 62.
    """
    return {3 * i + section for section in range(3) for i in range(sections[section])}
