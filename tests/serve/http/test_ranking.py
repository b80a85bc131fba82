"""Rerankers and classifiers, over a fake engine.

Its scores are the lengths of prompts.
"""

import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest

from llamacli.serve.requests import Admitted, Done, Embedding, EmbeddingRequest, Timings, Usage

DOCUMENTS = ["a b c", "a", "a b c d e f"]


@pytest.fixture
def engine(fake) -> Iterator[Any]:
    """Make the fake engine rank; `head(ranks=False)` makes it embed."""
    infos = fake.models()

    def head(**fields: Any) -> None:
        fake.models = lambda: (attrs.evolve(infos[0], embeds=True, **{"ranks": True, "pooling": "rank"} | fields),)

    def script(request: EmbeddingRequest) -> list[Any]:
        vectors = []
        for i, ids in enumerate(request.prompts):
            n = len(ids)
            shape = {"rank": [n / 4, -n] if fake.models()[0].labels else [n / 4], "none": [[n, 0.0]] * n}
            vectors.append(Embedding(i, np.array(shape.get(str(request.pooling), [n, 1.0]), np.float32)))
        return [Admitted(0.0), *vectors, Done(Usage(sum(map(len, request.prompts))), Timings(0.0, 0.1, 0.0))]

    fake.script = script
    head()
    fake.head = head
    yield fake
    del fake.models


def scores(results: list[dict[str, Any]], name: str = "relevance_score") -> list[tuple[int, float]]:
    return [(one["index"], one[name]) for one in results]


def test_jina_and_cohere(engine, http) -> None:
    reply = http.send("/v1/rerank", {"query": "x", "documents": DOCUMENTS}).json
    lengths = [len(ids) for ids in engine.requests[-1].prompts]
    assert scores(reply["results"]) == [(i, lengths[i] / 4) for i in (2, 0, 1)]
    assert reply["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert (reply["model"], reply["object"]) == ("demo", "list")
    fields = {"query": "x", "documents": [{"text": one} for one in DOCUMENTS], "top_n": 2, "return_documents": True}
    best, second = http.send("/v2/rerank", {**fields, "use_activation": True}).json["results"]
    assert (best["document"], second["document"]) == ({"text": DOCUMENTS[2]}, {"text": DOCUMENTS[0]})
    assert best["relevance_score"] == pytest.approx(1 / (1 + math.exp(-lengths[2] / 4)))


def test_text_embeddings_inference(engine, http) -> None:
    reply = http.send("/rerank", {"query": "x", "texts": DOCUMENTS, "return_text": True, "top_n": 1}).json
    assert reply == [{"index": 2, "score": len(engine.requests[-1].prompts[2]) / 4, "text": DOCUMENTS[2]}]


def test_scores_of_pairs(engine, http) -> None:
    one = http.send("/v1/score", {"text_1": "x", "text_2": DOCUMENTS}).json["data"]
    pairs = http.send("/score", {"queries": ["x"] * 3, "documents": DOCUMENTS, "use_activation": False}).json["data"]
    assert [0 < pair["score"] < 1 for pair in one] == [True] * 3
    assert [round(math.log(a["score"] / (1 - a["score"])), 4) for a in one] == [b["score"] for b in pairs]


def test_scores_of_a_model_without_a_head_are_cosines(engine, http) -> None:
    engine.head(ranks=False, pooling="mean")
    (pair,) = http.send("/score", {"text_1": "a b", "text_2": "a"}).json["data"]
    lengths = [len(ids) for ids in engine.requests[-1].prompts]
    assert pair["score"] == lengths[0] * lengths[1] + 1
    engine.head(ranks=False, pooling="none")
    assert http.send("/score", {"text_1": "a b", "text_2": "a"}).status == 501


def test_classes_have_labels_and_probabilities(engine, http) -> None:
    engine.head(labels=("good", "bad"))
    found = http.send("/classify", {"input": ["a b", "a"]}).json["data"]
    assert [(one["label"], one["num_classes"], sum(one["probs"])) for one in found] == [("good", 2, 1.0)] * 2
    engine.head()
    (one,) = http.send("/v1/classify", {"input": [[5, 6]]}).json["data"]
    assert (one["label"], one["probs"]) == ("LABEL_0", [1 / (1 + math.exp(-0.5))])
    engine.head(normalized=True)
    assert http.send("/classify", {"input": [[5, 6]]}).json["data"][0]["probs"] == [0.5]


def test_tasks_of_pooling(engine, http) -> None:
    for pooling, task, expected in (
        ("rank", None, [0.5]),
        ("mean", None, [2.0, 1.0]),
        ("last", "embed", [2.0, 1.0]),
        ("last", "token_embed", [[2.0, 0.0]] * 2),
        ("last", "classify", [0.5]),
    ):
        engine.head(pooling=pooling)
        body = {"input": [[5, 6]], "task": task, "use_activation": False}
        assert http.send("/pooling", body).json["data"] == [{"index": 0, "object": "pooling", "data": expected}]
        assert (engine.requests[-1].pooling == pooling) is (task in (None, "embed"))
    short = http.send("/pooling", {"input": [[5, 6]], "task": "embed", "dimensions": 1, "encoding_format": "base64"})
    assert short.json["data"][0]["data"] == "AACAPw=="


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/rerank", {"query": "x"}, "documents"),
        ("/rerank", {"query": "x", "documents": []}, "documents"),
        ("/rerank", {"query": "x", "documents": 123}, "documents"),
        ("/rerank", {"query": "x", "documents": [1, 2]}, "documents[0]"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "x", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "x", "documents": ["a"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ("/score", {"text_1": "x"}, "text_2"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["a"]}, "text_2"),
        ("/score", {"text_1": "x", "queries": "x", "text_2": "a"}, "text_1"),
        ("/classify", {}, "input"),
        ("/pooling", {"input": "a", "task": "other"}, "task"),
        ("/pooling", {"input": "a", "dimensions": 1}, "dimensions"),
    ],
)
def test_refused(path: str, fields: dict, param: str, engine, http) -> None:
    reply = http.send(path, fields)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not engine.requests


def test_long_pairs_are_refused_unless_they_may_be_cut(engine, http) -> None:
    fields = {"query": "x", "documents": ["a b " * 5000]}
    assert http.send("/rerank", fields).json["error"]["code"] == "context_length_exceeded"
    assert http.send("/rerank", {**fields, "truncate_prompt_tokens": 9}).status == 200
    assert len(engine.requests[-1].prompts[0]) == 9


def test_models_without_a_head_or_vectors_of_texts(engine, http) -> None:
    engine.head(ranks=False, pooling="mean")
    for path, fields in (
        ("/rerank", {"query": "x", "documents": ["a"]}),
        ("/classify", {"input": "a"}),
        ("/pooling", {"input": "a", "task": "classify"}),
    ):
        assert http.send(path, fields).status == 501
    engine.head()
    assert http.send("/v1/embeddings", {"input": "a"}).status == 501
    engine.head(ranks=False, pooling="none")
    assert http.send("/v1/embeddings", {"input": "a"}).status == 400
    assert http.send("/embedding", {"content": [[5, 6]]}).json == [{"index": 0, "embedding": [[2.0, 1.0]]}]
    assert engine.requests[-1].normalize is False
