"""Bounds of SwiGLU by layer."""

from typing import Any

from llamacli.plugin import Activation, Metadata, swiglu_clamped


def limits(metadata: Metadata, key: str, n: int, default: tuple[float, ...] = ()) -> tuple[float, ...]:
    """Bound of each of n layers, 0 for none.

    Files without the key have the `default`, or no bounds.
    """
    if key not in metadata:
        return default or (0.0,) * n
    return metadata.get_floats(key, n, minimum=0.0)


def clamped(*bounds: float) -> list[Any]:
    """SwiGLU within each bound; below 1e-6 there is none."""
    return [swiglu_clamped(bound) if bound > 1e-6 else Activation.SWIGLU for bound in bounds]
