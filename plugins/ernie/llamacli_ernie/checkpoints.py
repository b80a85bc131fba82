"""Hugging Face checkpoints of ERNIE 4.5, dense."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Settings, hookimpl

LLAMACLI_API = 1


def _space_prefix(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    added = tokenizer.get("add_prefix_space")
    return {} if added is None else {"tokenizer.ggml.add_space_prefix": bool(added)}


DENSE = Checkpoint(
    "ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), {},
    {"num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "head_dim": 128,
     "rope_theta": 500000.0},
    ("sentencepiece",), tokenizer=_space_prefix, rename=((r"^ernie\.", "model."),),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layout."""
    register(DENSE)
