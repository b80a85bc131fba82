"""Perplexity, compared with llama.cpp's results and with the definition."""

import json
from pathlib import Path

import numpy as np
import pytest

import llamacli
from conftest import LoadTiny
from llamacli import InvalidRequestError, Session
from llamacli.tools.perplexity import Estimate, perplexity, perplexity_tokens
from oracle.goldens import sha256
from oracle.perplexity import PATH, story_text

GOLDENS = json.loads(PATH.read_text())
DEMO = Path(llamacli.__file__).parent / "data" / "demo.gguf"
TOKENS = np.random.RandomState(3).randint(3, 128, 100).tolist()


@pytest.mark.parametrize("mode", ["auto", "fp32"])
@pytest.mark.parametrize("name", GOLDENS)
def test_result_matches_llama_cpp(name, mode, shared, plugins) -> None:
    path = DEMO if name == DEMO.name else shared(f"models/{name}")
    golden = GOLDENS[name]
    assert sha256(path) == golden["sha256"], "another model than was recorded: run oracle.perplexity again"
    with llamacli.load_model(path, mode, plugins=plugins) as model:
        tokens = perplexity_tokens(model, story_text())
        assert len(tokens) == golden["n_tokens"]
        *_, last = perplexity(model, tokens, n_ctx=golden["n_ctx"])
    wanted, bound = (golden["in_f32"], 5e-4) if mode == "fp32" else (golden, 5e-3)
    assert last.value == pytest.approx(wanted["value"], rel=bound)
    assert last.error == pytest.approx(wanted["error"], rel=bound)


def surprise(model: llamacli.Model, tokens: list[int]) -> np.ndarray:
    """Negative log-likelihood of each token from the second on."""
    with model.create_session() as session:
        logits = session.eval(tokens, all_logits=True).astype(np.float64)
    logarithms = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -logarithms[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.parametrize("n_ctx", [4, 5, 16, 33])
@pytest.mark.parametrize("tokenizer", ["test", "spm"])
def test_second_half_of_each_chunk_is_scored(load_tiny: LoadTiny, n_ctx, tokenizer) -> None:
    model = load_tiny(tokenizer=tokenizer)
    scored = []
    for i, estimate in enumerate(perplexity(model, TOKENS, n_ctx=n_ctx)):
        chunk = TOKENS[i * n_ctx : (i + 1) * n_ctx]
        if model.tokenizer.add_bos:
            chunk = [model.tokenizer.bos_id, *chunk[1:]]
        scored += surprise(model, chunk)[n_ctx // 2 :].tolist()
        assert estimate.n_chunks == i + 1
        assert estimate.n_scored == len(scored) == (i + 1) * (n_ctx - n_ctx // 2 - 1)
        assert estimate.value == pytest.approx(np.exp(np.mean(scored)), rel=1e-6)
        if len(scored) > 1:
            error = estimate.value * np.std(scored) / np.sqrt(len(scored) - 1)
            assert estimate.error == pytest.approx(error, rel=1e-4)
    assert i + 1 == len(TOKENS) // n_ctx


def test_chunks_begin_with_bos(load_tiny: LoadTiny) -> None:
    assert load_tiny(tokenizer="spm").tokenizer.add_bos
    assert not load_tiny().tokenizer.add_bos


def test_max_chunks(load_tiny: LoadTiny) -> None:
    model = load_tiny()
    every = list(perplexity(model, TOKENS, n_ctx=8))
    assert list(perplexity(model, TOKENS, n_ctx=8, max_chunks=3)) == every[:3]
    assert list(perplexity(model, TOKENS, n_ctx=8, max_chunks=1000)) == every


def test_uniform_model(load_tiny: LoadTiny, tiny_gguf) -> None:
    model = load_tiny(tensors={"output.weight": np.zeros((128, 64))})
    *_, last = perplexity(model, TOKENS, n_ctx=10)
    assert last == Estimate(10, 40, pytest.approx(128), pytest.approx(0, abs=1e-5))


@pytest.mark.parametrize("n_ctx", [3, 0, -1, 8.0, True])
def test_invalid_context_lengths(load_tiny: LoadTiny, n_ctx) -> None:
    with pytest.raises(InvalidRequestError, match="n_ctx must be an integer of at least 4"):
        perplexity(load_tiny(), TOKENS, n_ctx=n_ctx)


def test_text_too_short(load_tiny: LoadTiny) -> None:
    with pytest.raises(InvalidRequestError, match="the text has 100 tokens, and chunks of 51 need at least 102"):
        perplexity(load_tiny(), TOKENS, n_ctx=51)


@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_error_for_nan(load_tiny: LoadTiny) -> None:
    broken = load_tiny(metadata={"llama.rope.scaling.attn_factor": 3e38})
    with pytest.raises(InvalidRequestError, match="the model's logits in chunk 1 are not finite"):
        list(perplexity(broken, list(range(64)) * 2, n_ctx=64))


def test_logits_of_minus_infinity(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Session.eval

    def forbid(session, tokens, *, all_logits=False):
        logits = evaluate(session, tokens, all_logits=all_logits)
        if logits is not None:
            logits[:, :2] = -np.inf
        return logits

    monkeypatch.setattr(Session, "eval", forbid)
    model = load_tiny(tensors={"output.weight": np.zeros((128, 64))})
    *_, last = perplexity(model, TOKENS, n_ctx=10)
    assert last.value == pytest.approx(126)
