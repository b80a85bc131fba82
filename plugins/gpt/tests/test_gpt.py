"""Files of the GPT family, and what learned positions rule out."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import InvalidRequestError, Model, load_model
from llamacli.engine import Engine, ReferenceEngine, default_engine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli_gpt import Gpt2, PocketTts, StarCoder2
from tiny_gpt import INERT, VARIANTS, write_gpt

NAMES = ("gpt2", "pockettts", "starcoder2")
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


@parametrize_with_checks([Gpt2(), PocketTts(), StarCoder2()], VARIANTS, inert=INERT, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_contexts_are_no_longer_than_the_table_of_positions(load_tiny) -> None:
    model = load_tiny("gpt2")
    with pytest.raises(InvalidRequestError, match="n_ctx must be at most 256, the positions that the model learned"):
        model.create_session(n_ctx=257)
    with pytest.raises(InvalidRequestError, match="at most 256"):
        model.kv_cache(n_ctx_seq=300)
    with model.create_session(n_ctx=256) as session:
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
