"""Hyperparameters and invalid files of Llama 4.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import Model, ModelFormatError, load_model
from llamacli.engine import Engine, ReferenceEngine, default_engine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli_llama.llama4 import Llama4
from tiny_llama4 import VARIANTS, write_llama4


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(engine: Engine | None = None, **options: Any) -> Model:
        path = write_llama4(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("llama4", "llamacli_llama.llama4", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=engine or ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Llama4()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", None),
        ("expert_count", None),
        ("expert_used_count", 9),
        ("expert_feed_forward_length", 0),
        ("interleave_moe_layer_step", None),
        ("attention.sliding_window", 0),
        ("rope.dimension_count", 8),
    ],
)
def test_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"llama4\.{key}"):
        load(metadata={f"llama4.{key}": value})


@pytest.mark.parametrize(
    "tensor",
    ["blk.0.exp_probs_b.bias", "blk.0.ffn_gate_exps.weight", "blk.1.ffn_up.weight", "blk.0.attn_q_norm.weight"],
)
def test_unknown_tensors_are_named(tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {tensor} \(8,\) is not one that"):
        load(tensors={tensor: np.ones(8)})


def test_layers_that_are_chunked(load: Any) -> None:
    assert [state.chunk for state in load().program.states] == [8192, 8192, 8192, None]


def test_chunks_are_evicted_as_a_whole(load: Any) -> None:
    model = load(context_length=8400, engine=default_engine())
    tokens = np.random.default_rng(3).integers(0, 128, 8200).tolist()
    with model.create_session(n_ctx=8400, reuse=False) as session:
        session.eval(tokens)
        pages = [pages.n_used for pages in session.cache.pool.groups]
        assert pages == [1, 513]
        session.rewind(8193)
        assert session.n_cached == 8193
        session.rewind(8190)
        assert session.n_cached == 0
