"""`Llama` of llama-cpp-python, on the demo model."""

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llamacli import InvalidRequestError, load_model
from llamacli.compat import llama_cpp
from llamacli.compat.llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList
from llamacli.hub.demo import demo_path

PROMPT = "Once upon a time"


@pytest.fixture
def llama() -> Iterator[Llama]:
    with Llama(str(demo_path()), n_ctx=256, n_threads=1, seed=7, n_gpu_layers=-1, verbose=False) as llama:
        yield llama


def text(result: dict[str, Any]) -> str:
    return str(result["choices"][0]["text"])


def test_tokens(llama: Llama) -> None:
    ids = llama.tokenize(PROMPT.encode())
    assert ids[0] == llama.token_bos()
    assert llama.detokenize(ids) == PROMPT.encode()
    assert llama.tokenize(PROMPT.encode(), add_bos=False) == ids[1:]
    assert llama.tokenize(b"", special=True) == [llama.token_bos()]
    with Llama(str(demo_path()), vocab_only=True) as vocabulary:
        assert vocabulary.tokenize(PROMPT.encode()) == ids
        assert (vocabulary.n_vocab(), vocabulary.token_eos()) == (llama.n_vocab(), llama.token_eos())
        with pytest.raises(InvalidRequestError, match="vocab_only=True"):
            vocabulary.create_completion(PROMPT)
    assert (llama.n_ctx(), llama.metadata["general.architecture"]) == (256, "llama")


def test_completions_are_those_of_the_library(llama: Llama) -> None:
    with load_model(demo_path(), threads=1) as model:
        own = model.create_completion(PROMPT, max_tokens=12, temperature=0)
        result = llama(PROMPT, max_tokens=12, temperature=0)
        assert (text(result), result["usage"]) == (text(own), own["usage"])
        chunks = llama.create_completion(PROMPT, max_tokens=12, temperature=0, stream=True)
        assert "".join(map(text, chunks)) == text(own)
        messages = [{"role": "user", "content": "Tell me a story."}]
        chat = llama.create_chat_completion(messages, max_tokens=12, temperature=0)
        expected = model.create_chat_completion(messages, max_tokens=12, temperature=0)
        assert chat["choices"] == expected["choices"]


def test_seeds_of_completions_follow_that_of_the_model(llama: Llama) -> None:
    state = llama.save_state()
    first, second = (text(llama(PROMPT, max_tokens=8, temperature=1.5)) for _ in range(2))
    assert first != second
    llama.load_state(state)
    assert text(llama(PROMPT, max_tokens=8, temperature=1.5)) == first
    assert text(llama(PROMPT, max_tokens=8, seed=3)) == text(llama(PROMPT, max_tokens=8, seed=3))


def test_grammars_processors_and_criteria(llama: Llama) -> None:
    pytest.importorskip("llguidance")
    yes = LlamaGrammar.from_string('root ::= "yes" | "no"')
    assert text(llama(PROMPT, grammar=yes)) in ("yes", "no")
    number = LlamaGrammar.from_json_schema('{"enum": [7]}')
    assert text(llama(PROMPT, grammar=number)).strip() == "7"
    (token,) = llama.tokenize(b" fox", add_bos=False)

    def only(ids: Any, logits: Any) -> Any:
        return np.where(np.arange(len(logits)) == token, logits, -np.inf)

    n_prompt = len(llama.tokenize(PROMPT.encode()))
    ends = StoppingCriteriaList([lambda ids, logits: len(ids) == n_prompt + 2])
    found = llama(PROMPT, logits_processor=LogitsProcessorList([only]), stopping_criteria=ends)
    assert text(found) == " fox fox"


def test_generate_keeps_what_the_prompt_shares(llama: Llama) -> None:
    ids = llama.tokenize(PROMPT.encode())
    expected = list(itertools.islice(llama.generate(ids, temp=0), 4))
    assert llama.n_tokens == len(ids) + 3
    assert llama.context_params.n_ctx == llama.n_ctx()
    llama.eval([5, 6])
    assert list(itertools.islice(llama.generate(ids, temp=0), 4)) == expected
    llama.reset()
    llama.eval(ids)
    assert (llama.eval_tokens, llama.sample(temp=0)) == (ids, expected[0])


def test_options_of_rope_are_overrides(llama: Llama) -> None:
    with Llama(str(demo_path()), n_ctx=256, rope_freq_base=500.0, rope_freq_scale=0.5) as other:
        overrides = {"{arch}.rope.freq_base": 500.0, "{arch}.rope.scaling.type": "linear"}
        with load_model(demo_path(), overrides=overrides | {"{arch}.rope.scaling.factor": 2.0}) as model:
            expected = model.create_completion(PROMPT, max_tokens=60, temperature=0)
        assert text(other(PROMPT, max_tokens=60, temperature=0)) == text(expected)
        assert text(llama(PROMPT, max_tokens=60, temperature=0)) != text(expected)


def test_embeddings() -> None:
    with Llama(str(demo_path()), embedding=True, n_ctx=64, seed=-1, device=None) as llama:
        one, two = llama.embed(["fox", "an owl in a tree"])
        assert len(llama.embed("fox")) == len(one)
        result = llama.create_embedding(["fox", "an owl in a tree"])
        assert [item["embedding"] for item in result["data"]] == [one, two]
        assert result["usage"]["prompt_tokens"] == result["usage"]["total_tokens"] > 0
        with pytest.raises(InvalidRequestError, match="no context"):
            llama.eval([1])


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"n_gpu": 1}, TypeError, "Llama\\(\\) has no argument 'n_gpu'"),
        ({"yarn_orig_ctx": 9}, InvalidRequestError, "yarn_orig_ctx: kv_overrides"),
        ({"draft_model": object()}, InvalidRequestError, "draft_model: speculate="),
        ({"type_k": 99}, InvalidRequestError, "type_k 99 is not a type of cached keys"),
        ({"n_ctx": -1}, InvalidRequestError, "n_ctx must be an integer"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Llama(str(demo_path()), **options)


def test_other_libraries_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    llama_cpp.install()
    try:
        import llama_cpp as found

        assert found.Llama is Llama
    finally:
        del sys.modules["llama_cpp"]
