"""Tiny models that goldens are recorded of, by name.

Each family's plugin has a module with their writer and options.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_gemma
import tiny_gpt
import tiny_gptoss
import tiny_llama
import tiny_phi
import tiny_qwen


@dataclass(frozen=True)
class Variant:
    """Writer and options of a tiny model: `write(path, **options)`.

    `exact` bounds the NMSE of fp32 mode against the peer, which rounds within some functions even in float32.
    """

    write: Callable[..., Path]
    options: dict[str, Any]
    exact: float = 1e-8


GELU = 1e-5
"""Bound for GELU, which the peer reads from a float16 table."""

VARIANTS: dict[str, Variant] = {
    **{name: Variant(tiny_llama.write_llama, options) for name, options in tiny_llama.LLAMA.items()},
    **{name: Variant(tiny_gpt.write_gpt, options, GELU) for name, options in tiny_gpt.GPT.items()},
    **{name: Variant(tiny_gptoss.write_gptoss, options) for name, options in tiny_gptoss.GPTOSS.items()},
    **{name: Variant(tiny_gemma.write_gemma, options, GELU) for name, options in tiny_gemma.GEMMA.items()},
    **{name: Variant(tiny_gemma.write_gemma4, options, GELU) for name, options in tiny_gemma.GEMMA4.items()},
    **{name: Variant(tiny_phi.write_phi, options) for name, options in tiny_phi.PHI.items()},
    **{name: Variant(tiny_qwen.write_qwen, options) for name, options in tiny_qwen.QWEN.items()},
}


def write(path: Path, variant: str, **options: Any) -> Path:
    """Write a variant, with other options on top; `metadata` is merged."""
    made = VARIANTS[variant]
    metadata = made.options.get("metadata", {}) | options.get("metadata", {})
    return made.write(path, **made.options | options | {"metadata": metadata})
