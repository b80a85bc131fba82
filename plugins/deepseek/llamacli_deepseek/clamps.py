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


def expert_limits(metadata: Metadata, architecture: str, n: int, *, needed: bool = False) -> dict[str, Any]:
    """Fields `limits` and `limits_shared`, the bounds of experts in n layers.

    Shared experts have those of routed ones in files that do not say.
    """
    key = f"{architecture}.swiglu_clamp"
    routed = metadata.get_floats(f"{key}_exp", n, minimum=0.0) if needed else limits(metadata, f"{key}_exp", n)
    return {"limits": routed, "limits_shared": limits(metadata, f"{key}_shexp", n, routed)}


def clamped(*bounds: float) -> list[Any]:
    """SwiGLU within each bound; below 1e-6 there is none."""
    return [swiglu_clamped(bound) if bound > 1e-6 else Activation.SWIGLU for bound in bounds]
