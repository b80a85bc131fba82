"""Files of the GPT family, and what learned positions rule out."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import InvalidRequestError, Model, ModelFormatError, load_model
from llamacli.engine import Engine, ReferenceEngine, default_engine
from llamacli.plugins import ARCHITECTURES, Plugins
from tiny_gpt import write_gpt

NAMES = ("gpt2", "starcoder2")
TOKENS = list(range(3, 43))


@pytest.fixture(params=[ReferenceEngine, default_engine], ids=["reference", "default"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param()


@pytest.fixture
def load_tiny(tmp_path: Path, engine: Engine) -> Any:
    """Write a model of an architecture, and load it."""

    def load(architecture: str, **options: Any) -> Model:
        path = write_gpt(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, "llamacli_gpt", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=engine)

    return load


def test_contexts_are_no_longer_than_the_table_of_positions(load_tiny) -> None:
    model = load_tiny("gpt2")
    with pytest.raises(InvalidRequestError, match="seq_len must be at most 256, the positions that the model learned"):
        model.create_session(seq_len=257)
    with pytest.raises(InvalidRequestError, match="at most 256"):
        model.kv_cache(seq_len=300)
    with model.create_session(seq_len=256) as session:
        session.eval([i % 128 for i in range(256)])
        assert np.isfinite(session.logits).all()


def test_tokens_cannot_be_removed_from_the_middle(load_tiny) -> None:
    with load_tiny("gpt2").create_session() as session:
        session.eval(TOKENS)
        logits = session.logits.copy()
        with pytest.raises(InvalidRequestError, match="the cached keys of layer 0 cannot be moved to other positions"):
            session.remove_range(5, 10)
        assert session.tokens == tuple(TOKENS)
        np.testing.assert_array_equal(session.logits, logits)


def test_rope_keys_can_be_moved(load_tiny) -> None:
    with load_tiny("starcoder2").create_session() as session:
        session.eval(TOKENS)
        session.remove_range(5, 10)
        assert session.tokens == tuple(TOKENS[:5] + TOKENS[10:])


@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"without": ["blk.1.attn_norm.bias"]}, r"tensor blk\.1\.attn_norm\.bias is missing, expected \(64,\)"),
        ({"without": ["blk.0.ffn_up.bias"]}, r"tensor blk\.0\.ffn_up\.bias is missing, expected \(96,\)"),
        ({"tensors": {"output_norm.bias": np.zeros(63)}}, r"tensor output_norm\.bias has shape \(63,\), expected"),
        ({"tensors": {"blk.0.extra.weight": np.zeros(3)}}, r"tensor blk\.0\.extra\.weight \(3,\) is not one that"),
    ],
)
def test_mismatches_are_named(load_tiny, variant: str, options: dict, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load_tiny(variant, **options)


@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("value", [None, "x", -1.0])
def test_epsilon(load_tiny, variant: str, value: object) -> None:
    key = f"{variant}.attention.layer_norm_epsilon"
    with pytest.raises(ModelFormatError, match=key):
        load_tiny(variant, metadata={key: value})
