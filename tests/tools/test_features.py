"""Features of models, for variants of every family."""

import pytest

import tiny_variants
from conftest import TinyGguf
from llamacli.architecture import trace
from llamacli.loaders import open_model_file
from llamacli.plugins import Plugins
from llamacli.tools.features import features
from suite import REPRESENTATIVES, slow_but

EXPECTED = {
    "gqa": {"dense", "GQA 4/2 x 16", "RoPE base 10000"},
    "mha": {"MHA 4/4 x 16"},
    "mqa": {"MQA 4/1 x 16"},
    "tied": {"tied output"},
    "rope_yarn": {"YaRN"},
    "rope_linear": {"positions scaled"},
    "rope_freqs": {"RoPE factors"},
    "moe_8_2": {"8 experts, 2 used"},
    "qwen3_gqa": {"dense", "normed queries and keys"},
    "phi3_long": {"LongRoPE"},
    "phi3_partial": {"partial rotary"},
    "gemma2": {"geglu", "tied output", "scores capped at 2", "logits capped at 3"},
    "gemma3": {"geglu", "normed queries and keys", "window 10 in 6 of 7 layers"},
    "gemma4_e": {"per-layer embeddings"},
    "gptoss_gqa": {"swiglu_oai", "attention sinks", "YaRN"},
    "t5": {"dense", "MHA 4/4 x 16", "relative position bias", "encoder and decoder"},
}


def described(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> set[str]:
    file = open_model_file(tiny_gguf(variant), plugins.loaders())
    architecture = plugins.resolve(file.metadata)
    config = architecture.configure(file.metadata)
    return set(features(trace(architecture, config, architecture.tensors(config).bind(file))))


@pytest.mark.parametrize("variant", EXPECTED)
def test_features_of_variants(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    assert described(variant, tiny_gguf, plugins) >= EXPECTED[variant]


def test_features_of_a_plain_model(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    for variant in ("gqa", "t5"):
        assert described(variant, tiny_gguf, plugins) == EXPECTED[variant]


@pytest.mark.medium
@pytest.mark.parametrize("variant", slow_but(REPRESENTATIVES, tiny_variants.VARIANTS))
def test_every_variant_has_features(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    assert described(variant, tiny_gguf, plugins)
