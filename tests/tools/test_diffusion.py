"""Masked diffusion: logits and filled masks, compared with llama.cpp's."""

import itertools

import numpy as np
import pytest

import tiny_variants
from conftest import LoadTiny, TinyGguf, first_variants
from llamacli import EmbeddingModelError, InvalidRequestError, fill_masks
from oracle.diffusion import BLOCK_LENGTH, CANVAS, GOLDEN, MASK, STEPS, VARIANTS
from oracle.goldens import POSITIONS, TOKENS, nmse, sha256
from suite import slow_but

RECORDED = np.load(GOLDEN)


def test_goldens_match_the_files(tiny_gguf: TinyGguf) -> None:
    changed = [name for name in VARIANTS if sha256(tiny_gguf(name)) != str(RECORDED[f"{name} sha256"])]
    assert not changed, "the writer of these files changed: record the goldens again"


@pytest.mark.parametrize("variant", slow_but(first_variants(VARIANTS), VARIANTS))
def test_logits_match_llama_cpp(variant: str, load_tiny: LoadTiny) -> None:
    exact, auto = (load_tiny(variant, mode).logits(TOKENS.tolist()) for mode in ("fp32", "auto"))
    assert nmse(RECORDED[f"{variant} exact"], exact[POSITIONS]) <= tiny_variants.ENCODERS[variant].exact
    assert nmse(RECORDED[f"{variant} logits"], auto[POSITIONS]) <= 5e-3


@pytest.mark.parametrize("variant", slow_but(first_variants(VARIANTS), VARIANTS))
def test_masks_are_filled_as_by_llama_cpps_logits(variant: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(variant)
    for name, options in (("whole", {"steps": STEPS}), ("blocks", {"steps": 9, "block_length": BLOCK_LENGTH})):
        *_, last = fill_masks(model, CANVAS, **options)
        assert last == RECORDED[f"{variant} {name}"].tolist()


def test_each_step_fills_its_share(load_tiny: LoadTiny) -> None:
    model, n = load_tiny("llada"), CANVAS.count(MASK)
    for steps, block_length, counts in (
        (4, None, [5, 5, 4, 4]),
        (1, None, [n]),
        (100, None, [1] * n),
        (2, 8, [8, 8, 2]),
        (6, 8, [4, 4, 4, 4, 1, 1]),
    ):
        canvases = [CANVAS, *fill_masks(model, CANVAS, steps=steps, block_length=block_length)]
        left = [canvas.count(MASK) for canvas in canvases]
        assert [-int(filled) for filled in np.diff(left)] == counts
        for before, after in itertools.pairwise(canvases):
            assert all(old in (MASK, new) for old, new in zip(before, after, strict=True))


def test_draws_depend_on_temperature_and_seed(load_tiny: LoadTiny) -> None:
    model = load_tiny("llada")

    def filled(**options: float) -> list[int]:
        *_, last = fill_masks(model, CANVAS, steps=3, **options)
        return last

    assert filled(temperature=1.5) == filled(temperature=1.5)
    assert filled(temperature=1.5) != filled(temperature=1.5, seed=2)
    assert filled(temperature=1e-4) == filled()


def test_texts_without_masks_need_no_step(load_tiny: LoadTiny) -> None:
    assert [*fill_masks(load_tiny("llada"), [1, 2, 3])] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1, not 0"),
        ({"steps": 2.5}, "steps must be an integer"),
        ({"block_length": 0}, "block_length must be an integer of at least 1"),
        ({"temperature": -1.0}, "temperature must be a number of at least 0"),
        ({"temperature": float("nan")}, "temperature must be a number of at least 0"),
    ],
)
def test_values_out_of_range(options: dict[str, float], message: str, load_tiny: LoadTiny) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        fill_masks(load_tiny("llada"), CANVAS, **options)


def test_models_that_fill_no_masks(load_tiny: LoadTiny) -> None:
    with pytest.raises(InvalidRequestError, match="it has attention to earlier tokens only"):
        fill_masks(load_tiny("gqa", metadata={"tokenizer.ggml.mask_token_id": 5}), CANVAS)
    with pytest.raises(InvalidRequestError, match="it has no token for masks"):
        fill_masks(load_tiny("llada", metadata={"tokenizer.ggml.mask_token_id": None}), CANVAS)
    with pytest.raises(EmbeddingModelError, match="fill_masks if it is one of masked diffusion"):
        load_tiny("llada").create_session()
    with pytest.raises(InvalidRequestError, match="has 513 tokens; this model attends in both directions"):
        next(fill_masks(load_tiny("llada", metadata={"llada.context_length": 1024}), [MASK] * 513))
