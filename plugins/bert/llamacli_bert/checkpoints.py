"""Hugging Face checkpoints of BERT."""

from collections.abc import Callable

from llamacli.plugin import Checkpoint, field, hookimpl

LLAMACLI_API = 1

CHECKPOINTS = (
    Checkpoint(
        "bert", ("BertModel", "BertForMaskedLM"),
        {"attention.causal": False, "pooling_type": field("pooling")},
        {"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2},
        ("wordpiece",), pre=("bert-bge",),
        drop=(r"embeddings\.position_ids$", r"^(bert\.)?pooler\.dense\.", r"^cls\.(predictions|seq_relationship)"),
        rename=((r"^bert\.", ""), (r"\.gamma$", ".weight"), (r"\.beta$", ".bias")),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)
