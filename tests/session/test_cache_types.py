"""KV-cache types: closeness to float32, and the same bytes in both engines."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import ENGINES, LoadTiny, TinyGguf
from llamacli import (
    demo_path,
    load_model,
)
from llamacli.kv import KVSequence
from llamacli.plugins import Plugins
from llamacli.testing import formulas
from sessions import TOKENS

BOUNDS = {
    "f16": 1e-6, "bf16": 1e-4, "q8_0": 1e-4, "q5_0": 6e-3, "q5_1": 4e-3, "q4_0": 2e-2, "q4_1": 1.5e-2, "iq4_nl": 2e-2,
}  # fmt: skip
"""NMSE of logits with the cache as each type, against f32."""


@pytest.mark.parametrize("mode", ["fp32", "auto"])
@pytest.mark.parametrize(("kv_type", "bound"), BOUNDS.items())
def test_logits_with_rounded_cache_are_close(kv_type: str, bound: float, mode: str, load_tiny: LoadTiny) -> None:
    model = load_tiny("gqa", mode)
    exact = model.create_session(kv_type="f32").eval(TOKENS, all_logits=True)
    rounded = model.create_session(kv_type=kv_type).eval(TOKENS, all_logits=True)
    assert 0 < formulas.nmse(rounded, exact) < bound


STORY = """One day, a little girl named Lily went to the park with her mother. She saw a big dog and wanted to play
with it. The dog was happy and ran to her. Lily laughed and threw a ball. The dog ran after the ball and brought it
back. They played all day, and then it was time to go home. Lily said goodbye to the dog and held her
mother's hand."""
ON_STORIES = {
    "f16": 1e-6, "bf16": 1e-4, "q8_0": 1e-4, "q5_0": 1.7e-3, "q5_1": 1.5e-3, "q4_0": 1e-2, "q4_1": 1e-2, "iq4_nl": 1e-2,
}  # fmt: skip
OF_DEMO = {"q5_0": 2e-3}


@pytest.mark.parametrize("name", ["demo", "stories260K.gguf", "TinyStories-656K.Q8_0.gguf"])
@pytest.mark.parametrize(("kv_type", "bound"), ON_STORIES.items())
def test_logits_of_stories_with_rounded_cache_are_close(
    kv_type: str, bound: float, name: str, plugins: Plugins, shared: Callable[[str], Path]
) -> None:
    path = demo_path() if name == "demo" else shared(f"models/{name}")
    model = load_model(path, "fp32", plugins=plugins)
    tokens = model.encode(STORY)
    exact, rounded = (model.create_session(kv_type=kind).eval(tokens, all_logits=True) for kind in ("f32", kv_type))
    assert 0 < formulas.nmse(rounded, exact) < (OF_DEMO.get(kv_type, bound) if name == "demo" else bound)


@pytest.mark.parametrize("variant", ["gqa", "head_dim"])
@pytest.mark.parametrize("kv_type", [*BOUNDS, ("q8_0", "q4_1"), ("q5_0", "iq4_nl")], ids=str)
def test_engines_agree(kv_type: str, variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    models = [load_model(tiny_gguf(variant), "fp32", plugins=plugins, engine=engine()) for engine in ENGINES.values()]
    logits = [model.create_session(kv_type=kv_type).eval(TOKENS, all_logits=True) for model in models]
    # Kernels round queries and weights to 16 bits: a few codes of the next layer's cells are the neighbouring ones.
    assert formulas.nmse(logits[1], logits[0]) < (1e-6 if kv_type in ("f16", "bf16", "q8_0") else 2e-5)


@pytest.mark.parametrize("kv_type", BOUNDS)
def test_engines_store_the_same_bytes(kv_type: str, load_tiny: LoadTiny) -> None:
    """The bytes stored by an engine equal those that NumPy rounds to."""
    model = load_tiny("gqa")
    exact, rounded = (model.create_session(kv_type=kind) for kind in ("f32", kv_type))
    for session in (exact, rounded):
        session.eval(TOKENS)
    again = KVSequence(model.kv_pool(kv_type), 64)
    again.reserve(0, len(TOKENS))
    keys, values = exact.cache.read(0, len(TOKENS))  # of the first layer: the others see rounded ones
    again.write(0, 0, keys.transpose(2, 0, 1), values.transpose(1, 0, 2))
    for mine, theirs in zip(again.read(0, len(TOKENS)), rounded.cache.read(0, len(TOKENS)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
