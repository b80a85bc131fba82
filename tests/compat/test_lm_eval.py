"""Model of lm-evaluation-harness, on the demo model."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamacli import InvalidRequestError, Model, load_model
from llamacli.hub.demo import demo_path

lm_eval = pytest.importorskip("lm_eval")

from llamacli.compat.lm_eval import HarnessModel  # noqa: E402 - its base class is the harness's

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_model(demo_path()) as model:
        yield model


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=given) for given in arguments]


def logprobs(model: Model, ids: list[int]) -> np.ndarray:
    """Log-probability of each token after the first."""
    rows = model.logits(ids).astype(np.float64)[:-1]
    rows -= rows.max(axis=1, keepdims=True)
    return rows[range(len(ids) - 1), ids[1:]] - np.log(np.exp(rows).sum(axis=1))


def test_loglikelihood(model: Model) -> None:
    harness = HarnessModel(model)
    pairs = [("Once upon a time", ", there were"), ("Once upon a", " green zebra"), ("", "Once upon")]
    found = harness.loglikelihood(requests(*pairs), disable_tqdm=True)
    for (context, continuation), (logprob, is_greedy) in zip(pairs[:2], found[:2], strict=True):
        before, ids = harness.tok_encode(context), harness.tok_encode(context + continuation)
        assert logprob == pytest.approx(logprobs(model, ids)[len(before) - 1 :].sum(), abs=1e-3)
        with model.create_session() as session:
            drawn = [token.id for token in session.generate(before, max_tokens=len(ids) - len(before))]
        assert is_greedy == (drawn == ids[len(before) :])
    assert [greedy for _, greedy in found[:2]] == [True, False]
    whole = [harness.prefix_token_id, *harness.tok_encode("Once upon", add_special_tokens=False)]
    assert found[2][0] == pytest.approx(logprobs(model, whole).sum(), abs=1e-3)
    assert harness.loglikelihood(requests(*pairs[::-1]), disable_tqdm=True) == found[::-1]


def test_long_texts_are_scored_in_windows(model: Model) -> None:
    harness = HarnessModel(model)
    text = "Once upon a time, there was a little fox. " * 150
    n = len(harness.tok_encode(text, add_special_tokens=False))
    assert n > model.config.n_ctx
    (whole,) = harness.loglikelihood_rolling(requests((text,)))
    (short,) = harness.loglikelihood_rolling(requests((text[:40],)))
    ids = [harness.prefix_token_id, *harness.tok_encode(text[:40], add_special_tokens=False)]
    assert short == pytest.approx(logprobs(model, ids).sum(), abs=1e-3)
    assert np.isfinite(whole)
    assert whole < short
    ((logprob, _),) = harness.loglikelihood(requests((text, " The end.")), disable_tqdm=True)
    assert np.isfinite(logprob)


def test_generated_texts(model: Model) -> None:
    harness = HarnessModel(model)
    greedy = {"until": ["."], "max_gen_toks": 20, "do_sample": False, "temperature": 1.0}
    found = harness.generate_until(
        requests(("Once upon a time", greedy), ("Long ago", {"max_gen_toks": 4}), ("The fox", greedy))
    )
    for text, prompt in ((found[0], "Once upon a time"), (found[2], "The fox")):
        expected = model.create_completion(prompt, max_tokens=20, temperature=0, stop=["."])
        assert text == expected["choices"][0]["text"]
    assert "." not in found[0]
    for wrong, said in (({"beams": 2}, "beams is not known"), ({"max_gen_toks": 99999}, "no room")):
        with pytest.raises(InvalidRequestError, match=said):
            harness.generate_until(requests(("a", wrong)))


def test_chats_have_one_bos(model: Model) -> None:
    harness = HarnessModel(model)
    text = harness.apply_chat_template([{"role": "user", "content": "Tell me a story."}])
    with model.create_chat() as chat:
        chat.add_user("Tell me a story.")
        assert harness.tok_encode(text) == chat.render_turn()
    assert "im_start" in harness.chat_template()
    without = HarnessModel(model, add_bos=False).tok_encode("a")
    assert HarnessModel(model, add_bos=True).tok_encode("a") == [model.tokenizer.bos_id, *without]


def test_the_harness_evaluates_a_task(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = [
        {"q": "Once upon a time", "choices": [", there was", " green green green"], "answer": 0},
        {"q": "One day, a little", "choices": [" the the", " girl named"], "answer": 1},
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": "stories", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "target_delimiter": "",
        "doc_to_choice": "{{choices}}", "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    from lm_eval.api.task import ConfigurableTask

    results = lm_eval.simple_evaluate(
        model=HarnessModel(model), tasks=[ConfigurableTask(config=task)], bootstrap_iters=0, verbosity="ERROR"
    )
    assert results["results"]["stories"]["acc,none"] == 1.0
