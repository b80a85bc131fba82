"""Models without weights."""

from __future__ import annotations

import pytest

from conftest import TinyGguf
from llamacli import load_model
from llamacli.errors import InvalidRequestError
from llamacli.hub.demo import demo_path
from llamacli.serve.ray.tokenizing import context_length, load_unweighted


def test_a_model_without_weights_has_the_tokenizer_and_identity_of_the_whole() -> None:
    with load_model(demo_path()) as whole, load_unweighted(demo_path(), "auto") as model:
        assert model.identity == whole.identity
        assert model.encode("Once upon a time") == whole.encode("Once upon a time")
        assert context_length(model, None) == whole.config.n_ctx
        assert context_length(model, 100) == 100
        session = model.create_session()
        with pytest.raises(InvalidRequestError, match="without weights"):
            session.eval([1])


def test_a_model_without_weights_knows_of_its_head(tiny_gguf: TinyGguf) -> None:
    for name, has_head in (("gqa", False), ("qwen35_nextn", True)):
        with load_unweighted(tiny_gguf(name), "auto") as model:
            assert model.has_nextn == has_head
