"""Engines compared with llama.cpp's recorded results (see `tests/oracle/README.md`)."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import LoadTiny, TinyGguf, first_variants
from llamacli import Model, Session, load_model
from llamacli.engine import Engine, ReferenceEngine, default_engine
from llamacli.ops import linear, moe
from llamacli.plugins import Plugins
from oracle import long
from oracle.goldens import DIRECTORY, ENCODED, N_CTX, N_GREEDY, N_PROMPT, POSITIONS, TOKENS, Golden, nmse, sha256, sure
from suite import REPRESENTATIVES, slow_but
from tiny_variants import VARIANTS

FLAT = {"afmoe_dense_first", "grok_2", "muse_glimmer_capped"}
"""Variants whose bounded or random logits have few clear winners; their logits are compared all the same."""

CLOSE = 5e-3
FLOAT32 = [name for name, variant in VARIANTS.items() if "type" not in variant.options]
QUANTIZED = [name for name in VARIANTS if name not in FLOAT32]
EVERY = [*FLOAT32, *QUANTIZED]


def begun(model: Model) -> Session:
    session = model.create_session(n_ctx=N_CTX)
    if model.program.has_encoder:
        session.eval(model.encoder_inputs(ENCODED))
    return session


def all_logits(model: Model, tokens: Iterable[int] = TOKENS) -> np.ndarray:
    with begun(model) as session:
        return session.eval(list(tokens), all_logits=True)


def greedy(model: Model, prompt: list[int], n: int) -> list[int]:
    with begun(model) as session:
        return [token.id for token in session.generate(prompt, max_tokens=n, ignore_eos=True)]


def check_exact(golden: Golden, logits: np.ndarray, bound: float = 1e-8) -> None:
    assert nmse(golden.exact, logits[POSITIONS]) <= bound


def check_close(golden: Golden, logits: np.ndarray) -> None:
    assert nmse(golden.logits, logits[POSITIONS]) <= CLOSE


def check_top1(golden: Golden, logits: np.ndarray, gap: float, least: int = 10) -> None:
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    wide = first - second > gap
    assert wide.sum() >= least, "too few clear cases for a test"
    assert logits.argmax(-1)[wide].tolist() == golden.top1[wide].tolist()


def check_greedy(golden: Golden, ids: list[int], gap: float, least: int = 10) -> None:
    n = sure(golden.gaps, gap)
    assert n >= least, "too few clear cases for a test"
    assert ids[:n] == golden.greedy[:n].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({variant.family for variant in VARIANTS.values()}))
def test_goldens_match_the_files(family: str, tiny_gguf: TinyGguf) -> None:
    names = [name for name in VARIANTS if VARIANTS[name].family == family]
    changed = [name for name in names if sha256(tiny_gguf(name)) != Golden.load(name).sha256]
    assert not changed, "the writer of these files changed: record the goldens again"


@pytest.mark.every_case
@pytest.mark.parametrize("variant", slow_but(first_variants(FLOAT32), EVERY))
def test_fp32_matches_llama_cpp_on_float32_weights(variant: str, load_tiny: LoadTiny) -> None:
    check_exact(Golden.load(variant), all_logits(load_tiny(variant)), VARIANTS[variant].exact)


@pytest.mark.slow
@pytest.mark.parametrize("variant", long.VARIANTS)
def test_fp32_matches_llama_cpp_in_long_texts(variant: str, load_tiny: LoadTiny) -> None:
    with np.load(long.PATH) as golden, load_tiny(variant).create_session(n_ctx=long.N_CTX) as session:
        logits = session.eval(long.TOKENS, all_logits=True)[:: long.STEP]
        assert nmse(golden[variant], logits) <= VARIANTS[variant].exact


@pytest.mark.parametrize("variant", slow_but(REPRESENTATIVES, FLOAT32))
def test_fp32_greedy_tokens_match_llama_cpp(variant: str, load_tiny: LoadTiny) -> None:
    golden, model = Golden.load(variant), load_tiny(variant)
    least = 0 if variant in FLAT else 10
    check_top1(golden, all_logits(model), gap=1e-3, least=least)
    check_greedy(golden, greedy(model, TOKENS[:N_PROMPT].tolist(), N_GREEDY), gap=1e-3, least=least)


@pytest.mark.parametrize("variant", slow_but(REPRESENTATIVES, EVERY))
def test_auto_is_close_to_llama_cpp(variant: str, load_tiny: LoadTiny) -> None:
    golden, logits = Golden.load(variant), all_logits(load_tiny(variant, "auto"))
    check_close(golden, logits)
    least = 0 if variant in FLAT else 10
    gap = 0.3 * logits[np.isfinite(logits)].std()  # three times what CLOSE allows for
    check_top1(golden, logits, gap=gap, least=least)


@pytest.mark.parametrize("variant", slow_but(REPRESENTATIVES, EVERY))
def test_single_tokens_and_batches_are_bit_equal(variant: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(variant, "auto")
    whole = all_logits(model)
    with begun(model) as session:
        for token, expected in zip(TOKENS.tolist(), whole, strict=True):
            session.eval([token])
            np.testing.assert_array_equal(session.logits, expected)


@pytest.mark.parametrize("variant", ["gqa", "biases", "moe_8_2", "q8_0", "q4_k"])
@pytest.mark.parametrize(("mode", "least", "most"), [("q8", 1e-6, 5e-3), ("q4", 1e-3, 0.3)])
def test_requantized_modes_only_add_rounding(
    variant: str, mode: str, least: float, most: float, load_tiny: LoadTiny
) -> None:
    exact = all_logits(load_tiny(variant))
    error = nmse(exact, all_logits(load_tiny(variant, mode)))
    assert error <= most
    assert error >= least or (variant, mode) == ("q8_0", "q8")


@pytest.mark.parametrize(("variant", "mode"), [("q8_0", "q8"), ("q4_0", "q4")])
def test_requantizing_to_the_same_type_is_exact(variant: str, mode: str, load_tiny: LoadTiny) -> None:
    expected, actual = (all_logits(load_tiny(variant, name)) for name in ("auto", mode))
    np.testing.assert_array_equal(actual, expected)


APART = [
    *(("mha", name) for name in FLOAT32 if name.startswith("rope_")),
    *(("gemma3_global", "gemma3"), ("gemma4", "gemma4_values"), ("gemma4_moe", "gemma4_moe_apart")),
    *(
        ("gptoss_gqa", f"gptoss_{name}")
        for name in ("no_yarn", "sliding_base", "period_3", "layers_named", "top_1", "clamped")
    ),
    *(("qwen2_gqa", f"qwen2_{name}") for name in ("no_biases", "output_bias", "yarn")),
    *(("phi3_gqa", f"phi3_{name}") for name in ("biases", "long", "short", "partial")),
]


@pytest.mark.parametrize(("variant", "other"), APART)
def test_goldens_of_variants_differ(variant: str, other: str) -> None:
    assert nmse(Golden.load(variant).exact, Golden.load(other).exact) > 1e-3


BEYOND = ["rope_yarn", "gptoss_gqa", "qwen2_yarn", "qwen3_yarn", "phi3_long", "phi3_partial_long"]


@pytest.mark.parametrize("variant", BEYOND)
def test_prompts_go_beyond_the_original_context(variant: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(variant)
    original = model.config.rope.n_ctx_orig
    beyond = original <= POSITIONS
    assert original == 32
    assert beyond.sum() == 2
    logits = all_logits(model)[POSITIONS]
    assert nmse(Golden.load(variant).exact[beyond], logits[beyond]) <= 1e-8


@pytest.mark.parametrize("variant", ["phi3_short", "phi3_partial_short", "phi3_long", "phi3_partial_long"])
def test_context_length_selects_the_rope_factors(variant: str, load_tiny: LoadTiny) -> None:
    model, golden = load_tiny(variant), Golden.load(variant).exact
    original = model.config.rope.n_ctx_orig
    other = original + 1 if original == N_CTX else original
    with model.create_session(n_ctx=other) as session:
        logits = session.eval(TOKENS[:32].tolist(), all_logits=True)
    assert nmse(golden[:6], logits[POSITIONS[:6]]) > 1e-4


def rounded_to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def rounded_as_q8_0(x: np.ndarray) -> np.ndarray:
    """Round to int8 in blocks of 32 with float16 scales."""
    blocks = x.reshape(len(x), -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(blocks * (1 / scale)) * scale.astype(np.float16)).reshape(x.shape).astype(np.float32)


def rounded_as_q8_k(x: np.ndarray) -> np.ndarray:
    """Round to int8 in blocks of 256, the largest magnitude at -127."""
    blocks = x.reshape(len(x), -1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    inverse = np.float32(-127) / largest
    return (np.minimum(np.rint(blocks * inverse), 127) * (1 / inverse)).reshape(x.shape).astype(np.float32)


PEERS_ROUNDING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bf16": rounded_to_bfloat16,
    **dict.fromkeys(["q8_0", "q4_0", "q5_0", "moe_q8_0", "gptoss_mxfp4_q8_0"], rounded_as_q8_0),
    **dict.fromkeys(["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"], rounded_as_q8_k),
}
"""What the peer does to activations before it multiplies them with matrices of a type."""

N_EXPERT = 8
"""Of these variants: so many rows have routers and no other matrix, and they are float32."""


@pytest.mark.parametrize("variant", PEERS_ROUNDING)
def test_auto_differs_from_llama_cpp_by_activation_rounding_only(
    variant: str, tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, rounded = linear.product, PEERS_ROUNDING[variant]

    def rounded_product(x: np.ndarray, weight: np.ndarray, *, is_tiled: bool) -> np.ndarray:
        assert not is_tiled
        return product(x if len(weight) == N_EXPERT else rounded(x.astype(np.float32)).astype(np.float64), weight)

    for module in (linear, moe):
        monkeypatch.setattr(module, "product", rounded_product)
    model = load_model(tiny_gguf(variant), "auto", plugins=plugins, engine=ReferenceEngine())
    logits = model.create_session(kv_type="f32").eval(TOKENS.tolist(), all_logits=True)[POSITIONS]
    errors = [nmse(one, other) for one, other in zip(Golden.load(variant).logits, logits, strict=True)]
    # Measured 1e-13; but a number on the edge between two roundings falls to either side by the last bit of a sum, as
    # one does in bf16, and from its position on results differ.
    assert sorted(errors)[4] <= 1e-12
    assert max(errors) <= 2e-5


SMALL_TYPES = ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "tq1_0", "tq2_0", "q1_0", "nvfp4"]
SMALL_TYPES += ["mxfp4", "moe_iq1_m", "moe_iq2_xs", "moe_nvfp4"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", SMALL_TYPES)
def test_kernels_of_small_types_round_as_llama_cpp(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with load_model(tiny_gguf(variant), "auto", plugins=plugins, engine=default_engine()) as model:
        session = model.create_session(n_ctx=N_CTX, kv_type="f32")
        logits = session.eval(TOKENS.tolist(), all_logits=True)[POSITIONS]
    # Further on a number on the edge between two roundings falls to the other side in some, as above.
    errors = [nmse(one, other) for one, other in zip(Golden.load(variant).logits[:3], logits[:3], strict=True)]
    assert max(errors) <= 1e-12


class TestWrongResults:
    """The comparisons fail on wrong results."""

    def test_noise_is_detected(self, load_tiny: LoadTiny) -> None:
        golden, logits = Golden.load("gqa"), all_logits(load_tiny())
        check_exact(golden, logits)
        noise = np.random.default_rng(0).normal(0, 3e-4 * logits.std(), golden.exact.shape)
        with pytest.raises(AssertionError):
            check_exact(replace(golden, exact=golden.exact + noise), logits)

    def test_logits_of_another_model_are_detected(self, load_tiny: LoadTiny) -> None:
        logits = all_logits(load_tiny("mha", "auto"))
        with pytest.raises(AssertionError):
            check_close(Golden.load("rope_yarn"), logits)

    def test_one_wrong_token_is_detected(self, load_tiny: LoadTiny) -> None:
        golden, model = Golden.load("gqa"), load_tiny()
        logits, ids = all_logits(model), greedy(model, TOKENS[:N_PROMPT].tolist(), N_GREEDY)
        clearest = np.diff(np.sort(logits, axis=-1)[:, -2:])[:, 0].argmax()
        top1, other = golden.top1.copy(), golden.greedy.copy()
        top1[clearest] = (top1[clearest] + 1) % 128
        other[-1] = (other[-1] + 1) % 128
        with pytest.raises(AssertionError):
            check_top1(replace(golden, top1=top1), logits, gap=1e-3)
        with pytest.raises(AssertionError):
            check_greedy(replace(golden, greedy=other), ids, gap=1e-3)


@pytest.mark.parametrize("name", ["stories260K.gguf", "TinyStories-656K.Q8_0.gguf"])
def test_trained_models_generate_the_same_text_as_llama_cpp(
    name: str, shared: Callable[[str], Path], plugins: Plugins, engine: Engine
) -> None:
    expected = np.load(DIRECTORY / f"{name}.npy").tolist()
    with load_model(shared(f"models/{name}"), "fp32", plugins=plugins, engine=engine) as model:
        assert greedy(model, [model.tokenizer.bos_id], len(expected)) == expected
