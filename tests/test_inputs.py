"""Embeddings, positions and bidirectional spans as inputs, against llama.cpp and themselves."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tiny_variants
from input_cases import AFTER, CASES
from llamacli import Model, load_model
from llamacli.engine import Chunk, Engine, ReferenceEngine, default_engine, evaluate
from llamacli.inputs import Inputs
from llamacli.kv import KVSequence
from oracle.goldens import DIRECTORY, nmse, sha256
from tiny_variants import VARIANTS

GOLDENS = np.load(DIRECTORY / "inputs.npz")
Load = Callable[..., Model]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    models = []

    def load(variant: str, engine: Engine | None = None) -> Model:
        path = tiny_variants.write(tmp_path / f"{variant}.gguf", variant, dequantized=True)
        models.append(load_model(path, "fp32", engine=engine or default_engine(2)))
        return models[-1]

    yield load
    for model in models:
        model.close()


def logits_of(model: Model, *parts: Inputs | list[int]) -> np.ndarray:
    """Logits of all tokens, each part evaluated by itself."""
    sequence = KVSequence(model.kv_pool("f32"), 256)
    rows = []
    for part in parts:
        ids = part if isinstance(part, Inputs) else np.array(part, np.int32)
        rows += evaluate(model.program_with, [Chunk(sequence, ids, n_last=len(part))])
    sequence.close()
    return np.concatenate(rows)


@pytest.mark.parametrize("engine", [ReferenceEngine, lambda: default_engine(2)], ids=["reference", "native"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_peer(name: str, engine: Callable[[], Engine], load: Load, tmp_path: Path) -> None:
    case = CASES[name]
    model = load(case.variant, engine())
    assert sha256(tmp_path / f"{case.variant}.gguf") == str(GOLDENS[f"{name} sha256"])
    logits = logits_of(model, case.inputs(model.config.n_embd))[-1 - len(AFTER) :]
    assert nmse(GOLDENS[name], logits) <= max(1e-8, VARIANTS[case.variant].exact)
