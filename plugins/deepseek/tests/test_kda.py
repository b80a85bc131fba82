"""Checks of Kimi Linear and its kin, and of sparse attention.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import InvalidRequestError, Model, ModelFormatError, load_model
from llamacli.engine import ReferenceEngine
from llamacli.engine.native import NativeEngine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.conformance import check_op
from llamacli.testing.parametrize import Check
from llamacli_deepseek.pooling import Pool, PooledAttention
from llamacli_deepseek.streams import MixStreams, StreamGate, StreamWeights
from tiny_kda import HASHED, INERT, MODELS, VARIANTS

PLUGINS = Plugins(
    EntryPoint(name, f"llamacli_deepseek.{module}", ARCHITECTURES)
    for name, module in (("deepseek4", "deepseek4"), ("glm5-next", "glm5"), ("hy_v4", "hy4"))
)


@parametrize_with_checks(MODELS, VARIANTS, slow=pytest.mark.slow, inert=INERT)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("op", [MixStreams, Pool, PooledAttention, StreamGate, StreamWeights])
def test_ops(op: Any) -> None:
    check_op(op)


def load(path: Path, variant: str, engine: Any = None, **changed: Any) -> Model:
    write, options, _ = VARIANTS[variant]
    write(path, **options | changed)
    return load_model(path, "fp32", plugins=PLUGINS, engine=engine or ReferenceEngine())


@pytest.mark.parametrize(
    ("variant", "key", "value"),
    [
        ("hy_v4_indexer", "hy_v4.attention.indexer.types", [0, 1, 1]),
        ("hy_v4_indexer", "hy_v4.attention.indexer.types", [1, 0]),
        ("hy_v4_indexer", "hy_v4.attention.indexer.key_length", 8),
        ("glm5_next", "glm5-next.attention.indexer.types", [0, 1, 1, 1]),
        ("glm5_next", "glm5-next.attention.indexer.top_k", 10),
        ("glm5_next", "glm5-next.attention.indexer.kpool", 1),
        ("glm5_next", "glm5-next.attention.indexer.kpool_select_tail", False),
        ("glm5_next", "glm5-next.rope.dimension_count", 16),
        ("glm5_next", "glm5-next.hyper_connection.count", 2),
        ("glm5_next", "glm5-next.hyper_connection.sinkhorn_iterations", 0),
        ("deepseek4", "deepseek4.attention.compress_ratios", [0, 4, 16, 4]),
        ("deepseek4", "deepseek4.attention.compress_ratios", [0, 4]),
        ("deepseek4", "deepseek4.attention.output_group_count", 3),
        ("deepseek4", "deepseek4.attention.head_count_kv", 2),
        ("deepseek4", "deepseek4.expert_gating_func", 2),
        ("deepseek4", "deepseek4.embedding_length_out", 64),
        ("deepseek4", "deepseek4.hash_layer_count", 5),
        ("deepseek4", "deepseek4.nextn_predict_layers", 1),
    ],
)
def test_keys_are_named(variant: str, key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=key.rpartition(".")[2]):
        load(tmp_path / "model.gguf", variant, metadata={key: value})


@pytest.mark.parametrize("engine", [ReferenceEngine, lambda: NativeEngine(1)])
def test_experts_by_token_must_exist(engine: Any, tmp_path: Path) -> None:
    name = "blk.1.ffn_gate_tid2eid.weight"
    tensors = HASHED | {name: HASHED[name] + np.int32(1)}
    with pytest.raises(ModelFormatError, match=rf"tensor {name} has numbers other than 0 to 7"):
        load(tmp_path / "model.gguf", "deepseek4_hash", engine(), tensors=tensors).logits([1, 2, 3])


def test_blocks_cannot_be_shifted(tmp_path: Path) -> None:
    with load(tmp_path / "model.gguf", "deepseek4").create_session(reuse=False) as session:
        session.eval([5, 9, 1, 7, 3, 2])
        with pytest.raises(InvalidRequestError, match="cannot be moved"):
            session.remove_range(0, 2)
