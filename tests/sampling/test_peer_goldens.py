"""llama.cpp's samplers on random logits, recorded by tests/oracle/samplers.py."""

import json

import numpy as np
import pytest

from candidates import apply
from llamacli.errors import InvalidRequestError
from llamacli.gguf import Metadata
from llamacli.sampling import (
    AdaptiveP,
    Dry,
    DynamicTemperature,
    Infill,
    MinP,
    Mirostat,
    MirostatV2,
    Penalties,
    SamplingParams,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
    Xtc,
    build_chain,
)
from llamacli.testing.vocabularies import vocabulary
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata
from oracle.samplers import CASES, GOLDEN, HISTORY, INFILL, Step, infill_logits, logits

KINDS = {
    "temp": Temperature,
    "temp_ext": DynamicTemperature,
    "top_k": TopK,
    "top_p": TopP,
    "min_p": MinP,
    "typical": TypicalP,
    "top_n_sigma": TopNSigma,
    "xtc": Xtc,
    "penalties": Penalties,
    "dry": Dry,
    "mirostat": Mirostat,
    "mirostat_v2": MirostatV2,
    "adaptive_p": AdaptiveP,
}
EXPECTED = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(("case", "steps"), CASES.items(), ids=CASES)
def test_same_candidates_as_llama_cpp(case: str, steps: list[Step]) -> None:
    left = apply(logits(case), *(KINDS[kind](*arguments) for kind, *arguments in steps), history=HISTORY)
    assert left.ids.tolist() == EXPECTED[case]["ids"]
    assert left.probabilities().tolist() == pytest.approx(EXPECTED[case]["p"], abs=1e-5, rel=0)


def test_wrong_golden_fails() -> None:
    left = apply(logits("temperature"), Temperature(0.69))
    assert left.probabilities().tolist() != pytest.approx(EXPECTED["temperature"]["p"], abs=1e-5, rel=0)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tokenizer_from_metadata(Metadata(vocabulary("spm")))


@pytest.mark.parametrize("number", range(len(INFILL)))
def test_same_infill_as_llama_cpp(number: int, words: Tokenizer) -> None:
    left, expected = apply(infill_logits(number), TopK(40), Infill(words)), EXPECTED[f"infill {number}"]
    assert left.ids.tolist() == expected["ids"]
    assert left.probabilities().tolist() == pytest.approx(expected["p"], abs=1e-5, rel=0)


def test_infill_restores_an_end_but_no_forbidden_one(words: Tokenizer) -> None:
    flat = np.zeros(words.n_vocab, np.float32)
    flat[words.eos_id] = -30
    assert apply(flat.copy(), TopK(3), Infill(words)).ids.tolist() == [words.eos_id]
    flat[words.eos_id] = -np.inf
    flat[300] = 1
    assert apply(flat, Infill(words)).ids.tolist() == [300]


@pytest.mark.parametrize(("end", "kept"), [(0.11, 1), (0.09, 3)])
def test_infill_ends_by_the_share_of_ends(end: float, kept: int, words: Tokenizer) -> None:
    """Of three candidates an end needs 1 / (3 * 3 + 1)."""
    p = np.zeros(words.n_vocab)
    p[[words.eos_id, words.token_id("a"), words.token_id("b")]] = end, (1 - end) / 2, (1 - end) / 2
    with np.errstate(divide="ignore"):
        logits = np.log(p).astype(np.float32)
    left = apply(logits, TopK(3), Infill(words)).ids.tolist()
    assert (words.eos_id in left, len(left)) == (True, kept)


def test_infill_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError, match="infill needs a tokenizer"):
        build_chain(SamplingParams(samplers=("infill",), temperature=1.0))
