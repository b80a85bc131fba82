"""Bounds of SwiGLU by layer."""

from llamacli.plugin import Metadata


def limits(metadata: Metadata, key: str, n: int, default: tuple[float, ...] = ()) -> tuple[float, ...]:
    """Bound of each of n layers, 0 for none.

    Files without the key have the `default`, or no bounds.
    """
    if key not in metadata:
        return default or (0.0,) * n
    return metadata.get_floats(key, n, minimum=0.0)
