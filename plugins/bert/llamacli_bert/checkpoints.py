"""Hugging Face checkpoints of BERT and its relatives."""

from collections.abc import Callable
from typing import Any

import attrs

from llamacli.plugin import Checkpoint, Conversion, Settings, field, head_dim, hookimpl

LLAMACLI_API = 1

_TRAINED = {8192: 2048, 2048: 512}
"""Tokens that Nomic's models are trained for, by the `n_positions` of their folders."""


def _labels(settings: Settings) -> list[str] | None:
    """Names of classes; None without them, or with the two of transformers."""
    found = {int(i): name for i, name in (settings.get("id2label") or {}).items()}
    labels = [found[i] for i in sorted(found)]
    return None if not labels or (len(labels) == 2 and labels[0] == "LABEL_0") else labels


def _classifier_pooling(settings: Settings) -> int | None:
    kind = settings.get("classifier_pooling")
    return None if kind is None else {"mean": 1, "cls": 2}[kind]


def _offset(settings: Settings) -> int:
    """Rows of the table of positions before that of the first token."""
    return 0 if settings.get("pad_token_id") is None else int(settings["pad_token_id"]) + 1


def _types(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {"tokenizer.ggml.token_type_count": int(settings.get("type_vocab_size", 1))}


def _masked_head(settings: Settings) -> tuple[str, ...]:
    return () if "classifier.weight" in settings["tensor_names"] else (r"^(head|decoder)\.",)


def _context(settings: Settings) -> int:
    n = int(settings["n_positions"])
    return _TRAINED.get(n, n)


def _labelled(*patterns: tuple[str, str]) -> Callable[[Settings], tuple[tuple[str, str], ...]]:
    """Renamings, with that of a classifier whose classes have names."""
    return lambda settings: (
        *patterns, *(((r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1"),) if _labels(settings) else ()),
    )  # fmt: skip


def _neo_width(settings: Settings) -> int:
    return int(2 * settings["intermediate_size"] / 3)


def _types_of_two(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {} if kind == "wordpiece" else {"tokenizer.ggml.token_type_count": 2}


_KEYS: dict[str, Any] = {
    "attention.causal": False, "pooling_type": field("pooling"), "classifier.output_labels": _labels,
    "classifier.pooling_type": _classifier_pooling,
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {"layer_norm_eps": 1e-12, "max_position_embeddings": 512}
_DROP = (
    r"embeddings\.position_ids$", r"^((bert|roberta)\.)?pooler\.dense\.", r"^cls\.(predictions|seq_relationship)",
)  # fmt: skip
_RENAME = ((r"^(bert|roberta)\.", ""), (r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
_BERT = Checkpoint(
    "bert", ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"), _KEYS,
    _DEFAULTS | {"type_vocab_size": 2}, ("wordpiece",), pre=("bert-bge",), drop=_DROP, rename=_labelled(*_RENAME),
)  # fmt: skip
_NOMIC_EXPERTS = Checkpoint(
    "nomic-bert-moe", ("NomicBertModel",),
    _KEYS | {"context_length": _context, "moe_every_n_layers": field("moe_every_n_layers"),
             "expert_used_count": field("moe_top_k")},
    vocabulary=("fairseq", "wordpiece"), pre=("bert-bge",), drop=(r"\.experts\.bias$", *_DROP),
    rename=((r"(\.experts\.mlp\.w[12])$", r"\1.weight"), *_RENAME),
    convert={
        "ffn_up_exps.weight": Conversion(
            lambda array, settings: array.reshape(settings["num_experts"], -1, array.shape[1]),
            lambda shape, settings: (settings["num_experts"], shape[0] // settings["num_experts"], shape[1]),
        ),
        "ffn_down_exps.weight": Conversion(
            lambda array, settings: array.reshape(settings["num_experts"], -1, array.shape[1]).swapaxes(1, 2),
            lambda shape, settings: (settings["num_experts"], shape[1], shape[0] // settings["num_experts"]),
        ),
    },
)  # fmt: skip
_NOMIC: Checkpoint = Checkpoint(
    "nomic-bert", ("NomicBertModel",), _KEYS | {"context_length": _context}, {},
    ("wordpiece",), pre=("bert-bge",), drop=_DROP, rename=_RENAME,
    variant=lambda settings: _NOMIC_EXPERTS if settings.get("moe_every_n_layers") else _NOMIC,
)  # fmt: skip
_ROBERTA_KEYS = _KEYS | {"context_length": lambda settings: settings["max_position_embeddings"] - _offset(settings)}
_CHOPPED = {"position_embd.weight": Conversion(
    lambda array, settings: array[_offset(settings) :],
    lambda shape, settings: (shape[0] - _offset(settings), *shape[1:]),
)}  # fmt: skip
_XLM_ROBERTA = attrs.evolve(
    _BERT, classes=("XLMRobertaModel", "XLMRobertaForSequenceClassification"), defaults=_DEFAULTS,
    vocabulary=("fairseq",), keys=_ROBERTA_KEYS, convert=_CHOPPED, rename=_labelled(*_RENAME),
)  # fmt: skip
CHECKPOINTS = (
    _BERT,
    attrs.evolve(
        _BERT, classes=("DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification"),
        defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 1}, drop=(r"^vocab_", *_DROP),
        rename=_labelled((r"^distilbert\.", ""), *_RENAME),
    ),
    _XLM_ROBERTA,
    attrs.evolve(_XLM_ROBERTA, classes=("CamembertModel",), vocabulary=("numbered",)),
    Checkpoint(
        "jina-bert-v2", ("JinaBertModel", "JinaBertForMaskedLM"), _KEYS, _DEFAULTS | {"type_vocab_size": 2},
        ("wordpiece", "bpe"), pre=("bert-bge",), tokenizer=_types_of_two, drop=_DROP, rename=_RENAME,
    ),
    Checkpoint(
        "neo-bert", ("NeoBERT", "NeoBERTLMHead", "NeoBERTForSequenceClassification"),
        _KEYS | {"feed_forward_length": _neo_width, "rope.freq_base": 10000.0, "rope.scaling.type": "none",
                 "pooling_type": 2},
        {"norm_eps": 1e-6}, ("wordpiece",), pre=("bert-bge",), drop=(r"^decoder\.", *_DROP),
        rename=_labelled((r"^model\.", "")),
    ),
    Checkpoint(
        "eurobert", ("EuroBertModel", "JinaEmbeddingsV5Model"),
        {"attention.causal": False, "rope.scaling.type": "none", "pooling_type": field("pooling"),
         "classifier.pooling_type": lambda settings: {"mean": 1, "cls": 2}.get(settings.get("classifier_pooling"))},
        {"rms_norm_eps": 1e-5, "rope_theta": 250000.0, "head_dim": head_dim}, pre=("llama-bpe",),
        rename=((r"^model\.", ""),),
    ),
    attrs.evolve(
        _BERT, classes=("RobertaModel", "RobertaForSequenceClassification"), defaults=_DEFAULTS, tokenizer=_types,
        vocabulary=("bpe",), pre=("gpt-2",), keys=_ROBERTA_KEYS, convert=_CHOPPED, rename=_RENAME,
    ),
    Checkpoint(
        "modern-bert", ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
        _KEYS | {
            "attention.sliding_window": field("local_attention"), "rope.scaling.type": "none",
            "attention.sliding_window_pattern": field("global_attn_every_n_layers"),
            "vocab_size": field("vocab_size"), "hidden_activation": field("hidden_activation", kind=str),
        },
        {"norm_eps": 1e-5, "layer_norm_eps": field("norm_eps", kind=float), "hidden_activation": "gelu",
         "classifier_pooling": "cls", "global_rope_theta": 160000.0, "local_rope_theta": 10000.0},
        ("bpe",), drop=_masked_head,
        rename=((r"^model\.", ""), (r"^classifier\.", "classifier.out_proj.")),
    ),
    _NOMIC,
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)
