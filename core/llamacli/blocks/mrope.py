"""Multimodal RoPE (M-RoPE): pairs in sections for time, height and width.

Wang et al. 2024 (arXiv:2409.12191), Bai et al. 2025 (arXiv:2511.21631). A fourth section is of one
more position, which is 0 on text.
"""

import attrs

from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata
from llamacli.ops.rope import Rope


def read_mrope(metadata: Metadata, architecture: str, head_dim: int, *, alternate: bool, partial: bool = False) -> Rope:
    """Read `{architecture}.rope.*`, `dimension_sections` included.

    Sections follow each other, or `alternate` pair by pair. Only with `partial` may a part of each
    head be rotated. Raises ModelFormatError naming the key that is of a wrong type, out of range or unknown.
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
    components = _alternating(sections) if alternate else [i for i in range(4) for _ in range(sections[i])]
    return attrs.evolve(rope, components=tuple(components[i % len(components)] for i in range(rope.n_dims // 2)))


def _alternating(sections: tuple[int, ...]) -> list[int]:
    """Position component of each pair where the first three sections alternate.

    Their order is t, h, w, t, h, w, and so on. A section that is shorter than the first has gaps at the end, and the
    pairs there are of the fourth. With 24, 20 and 20 pairs these are 61 and 62.
    """
    return [i % 3 if i < 3 * sections[i % 3] else 3 for i in range(sum(sections))]
