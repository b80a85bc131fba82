"""llama.cpp's samplers on random logits, recorded by tests/oracle/samplers.py."""

import json

import pytest

from candidates import apply
from llamacli.sampling import (
    AdaptiveP,
    Dry,
    DynamicTemperature,
    MinP,
    Mirostat,
    MirostatV2,
    Penalties,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
    Xtc,
)
from oracle.samplers import CASES, GOLDEN, HISTORY, Step, logits

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
