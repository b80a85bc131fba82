"""Determinism: the same bits for any threads, batches, chunks and instruction sets."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import TinyGguf
from llamacli import Model, demo_path, eval_batch, load_model
from llamacli.kernels import isa
from llamacli.plugins import Plugins
from suite import examples

TOKENS = [(7 * i + 3) % 120 for i in range(70)]

LOGITS = """
import sys
import numpy as np
from llamacli import load_model
from llamacli.plugins import Plugins
from paths import entry_points
model = load_model(sys.argv[1], sys.argv[3], threads=2, plugins=Plugins(entry_points()))
tokens = [(7 * i + 3) % 120 for i in range(70)]
types = "f32", "f16", "q8_0", ("q5_1", "iq4_nl")
sessions = [model.create_session(kv_type=kv_type, reuse=False) for kv_type in types]
np.save(sys.argv[2], np.concatenate([session.eval(tokens, all_logits=True) for session in sessions]))
"""


@pytest.fixture(scope="module")
def models(tiny_gguf: TinyGguf, plugins: Plugins) -> dict[int, Model]:
    """A Q8_0 model with each number of threads."""
    return {n: load_model(tiny_gguf("q8_0"), threads=n, plugins=plugins) for n in (1, 2, 3)}


@pytest.fixture(scope="module")
def expected(models: dict[int, Model]) -> np.ndarray:
    return models[1].create_session(reuse=False).eval(TOKENS, all_logits=True)


@examples(100)
@given(st.sampled_from([1, 2, 3]), st.sets(st.integers(1, len(TOKENS) - 1), max_size=6), st.booleans())
def test_logits_do_not_depend_on_threads_and_chunks(
    models: dict[int, Model], expected: np.ndarray, threads: int, cuts: set[int], in_batch: bool
) -> None:
    """In chunks, and beside another sequence."""
    model = models[threads]
    with model.create_session(reuse=False) as session, model.create_session(reuse=False) as other:
        edges = [0, *sorted(cuts), len(TOKENS)]
        for start, stop in itertools.pairwise(edges):
            if in_batch:
                eval_batch([(other, TOKENS[:3]), (session, TOKENS[start:stop])])
            else:
                session.eval(TOKENS[start:stop])
            np.testing.assert_array_equal(session.logits, expected[stop - 1])


@pytest.mark.slow
def test_a_hundred_repeats_give_the_same_bits(models: dict[int, Model], expected: np.ndarray) -> None:
    for repeat in range(100):
        with models[1 + repeat % 3].create_session(reuse=False) as session:
            np.testing.assert_array_equal(session.eval(TOKENS, all_logits=True), expected)


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in isa.available(), reason="compares AVX-512 with AVX2")
@pytest.mark.parametrize("mode", ["auto", "fp32"])
@pytest.mark.parametrize("name", ["demo", "q4_k"])
def test_avx2_and_avx512_give_the_same_bits(name: str, mode: str, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """All logits, with four types of KV cache."""
    path = demo_path() if name == "demo" else tiny_gguf(name)
    kinds = {
        "avx512": {"LLAMACLI_ISA": "avx512"},
        "avx2": {"LLAMACLI_ISA": "avx2"},
    }
    for kind, variables in kinds.items():
        subprocess.run(
            [sys.executable, "-c", LOGITS, path, tmp_path / f"{kind}.npy", mode],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables, check=True,
        )  # fmt: skip
    wide, narrow = (np.load(tmp_path / f"{kind}.npy") for kind in kinds)
    assert np.isfinite(wide).all()
    np.testing.assert_array_equal(wide, narrow)
