"""Hyperparameters, tokens and invalid files of Phi.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import logging
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import Model, ModelFormatError, load_model, load_tokenizer
from llamacli.engine import ReferenceEngine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli_phi import Phi3
from tiny_phi import VARIANTS, write_phi

VOCABULARY = Path(__file__).resolve().parents[4] / "shared" / "vocab" / "ggml-vocab-phi-3.gguf"


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins([EntryPoint("phi3", "llamacli_phi", ARCHITECTURES)])


@pytest.fixture
def load(plugins: Plugins, tmp_path: Path) -> Any:
    def write_and_load(**options: Any) -> Model:
        path = write_phi(tmp_path / "model.gguf", **{"n_head_kv": 2} | options)
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Phi3()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_separate_projections_are_equivalent(load: Any) -> None:
    fused = {f"blk.{i}.attn_qkv.weight": np.random.default_rng(i).normal(0, 0.1, (128, 64)) for i in range(2)}
    apart = {
        name.replace("qkv", part): rows
        for name, weight in fused.items()
        for part, rows in zip("qkv", np.split(weight, [64, 96]), strict=True)
    }
    logits = [
        load(fused=tensors is fused, tensors=tensors).create_session().eval([1, 2], all_logits=True)
        for tensors in (fused, apart)
    ]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("name", ["rope_factors_long.weight", "rope_factors_short.weight"])
def test_extended_context_needs_rope_factors(name: str, load: Any) -> None:
    with pytest.raises(ModelFormatError) as raised:
        load(original=32)
    message = str(raised.value)
    assert f"tensor {name} is missing, expected (8,)" in message
    assert "phi3.context_length = 256" in message
    assert "phi3.rope.scaling.original_context_length = 32" in message
    factors = {"rope_factors_long.weight", "rope_factors_short.weight"} - {name}
    with pytest.raises(ModelFormatError, match=f"{name} is missing"):
        load(original=32, tensors=dict.fromkeys(factors, np.ones(8)))


def test_other_rope_scaling_needs_no_factors(load: Any) -> None:
    scaling = {"phi3.rope.scaling.type": "yarn", "phi3.rope.scaling.factor": 8.0}
    assert not load(original=32, metadata=scaling).config.longrope


@pytest.mark.parametrize("options", [{"original": 32}, {}])
def test_one_factor_per_pair(options: dict[str, Any], load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"factors_long.weight has shape \(9,\), expected \(8,\).*head_count"):
        load(factors=True, tensors={"rope_factors_long.weight": np.ones(9)}, **options)
    with pytest.raises(ModelFormatError, match=r"factors_long.weight has shape \(8,\), expected \(6,\).*count = 12"):
        load(factors=True, metadata={"phi3.rope.dimension_count": 12}, **options)


def test_head_counts_that_contradict_the_file(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"blk.0.attn_qkv.weight has shape .*expected \(192, 64\).*_kv = 4"):
        load(metadata={"phi3.attention.head_count_kv": 4})


def test_fused_gate_and_up(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"ffn_up.weight has shape \(96, 64\), expected \(192, 64\)"):
        load(tensors={"blk.0.ffn_up.weight": np.ones((96, 64)), "blk.0.ffn_gate.weight": np.ones((96, 64))})


def test_unused_sliding_window_warns(load: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "llamacli_phi"):
        plain = load().create_session().eval(list(range(40)), all_logits=True)
        assert caplog.text == ""
        sliding = (
            load(metadata={"phi3.attention.sliding_window": 8}).create_session().eval(list(range(40)), all_logits=True)
        )
    assert "phi3.attention.sliding_window = 8 is ignored" in caplog.text
    np.testing.assert_array_equal(sliding, plain)


class TestSpaces:
    """White space after Phi-3's special tokens, detected by the model's name."""

    def encode(self, name: str, text: str, plugins: Plugins, path: Path) -> list[int]:
        path = write_phi(path / "m.gguf", tokenizer="spm", metadata={"general.name": name})
        tokenizer = load_tokenizer(path, plugins=plugins)
        with load_model(path, plugins=plugins, engine=ReferenceEngine()) as model:
            ids = model.encode(text, add_special=False, parse_special=True)
        assert tokenizer.encode(text, add_special=False, parse_special=True) == ids
        return ids

    @pytest.mark.parametrize("name", ["Phi3", "Phi-3-mini-4k-instruct", "microsoft phi-3"])
    def test_after_an_end_token(self, name: str, plugins: Plugins, tmp_path: Path) -> None:
        with_space, without = (self.encode(name, text, plugins, tmp_path) for text in ("</s> \n a", "</s>a"))
        assert with_space == without
        assert self.encode(name, "<s> a", plugins, tmp_path) != self.encode(name, "<s>a", plugins, tmp_path)

    @pytest.mark.parametrize("name", ["Phi 3.5 Mini", "Phi-4-mini", ""])
    def test_not_in_other_models(self, name: str, plugins: Plugins, tmp_path: Path) -> None:
        assert self.encode(name, "</s> a", plugins, tmp_path) != self.encode(name, "</s>a", plugins, tmp_path)

    @pytest.mark.skipif(not VOCABULARY.is_file(), reason=f"{VOCABULARY} is not there")
    def test_published_vocabulary(self, plugins: Plugins) -> None:
        def encode(text: str, families: Plugins) -> list[int]:
            return load_tokenizer(VOCABULARY, plugins=families).encode(text, parse_special=True)

        assert encode("<|user|>\nHi<|end|>\n", plugins) == encode("<|user|>Hi<|end|>", plugins)
        none = Plugins([])
        assert encode("<|user|>\nHi<|end|>\n", none) != encode("<|user|>Hi<|end|>", none)
