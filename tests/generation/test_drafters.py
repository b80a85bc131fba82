"""Speculative decoding: the same text with drafters as without."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import tiny_variants
from adapters import write_adapter
from conftest import LoadTiny, TinyGguf
from llamacli import DraftModel, InvalidRequestError, Model, MtpHead, PromptLookup, SamplingParams, Session, load_model
from llamacli.engine import Engine, default_engine
from llamacli.engine.compiled_model import CompiledModel
from llamacli.generation.drafters import LIMIT_DRAFT, PredictedText
from llamacli.generation.drafting import Drafter
from llamacli.generation.drafts import Drafts
from llamacli.generation.stream import eval_batch
from llamacli.plugins import Plugins
from llamacli.testing.vocabularies import vocabulary_size
from suite import calls_at_most, examples

SEQ_LEN = 120
GRAMMARS = (None, "root ::= [a-z ]*", 'root ::= ("ab" | "c")+ [0-9]*')

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    mirostat=st.sampled_from([0, 0, 2]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    grammar=st.sampled_from(GRAMMARS),
    stop=st.sampled_from([(), ("e",), ("th", "a b")]),
    n_probs=st.sampled_from([0, 3]),
)


class Mixed:
    """Drafter that proposes what comes, with wrong tokens strewn in."""

    def __init__(self, text: Sequence[int], n_prompt: int, seed: int, error: float):
        self._text, self._n_prompt = text, n_prompt
        self._random, self._error = random.Random(seed), error

    def begin(self, model: CompiledModel) -> None:
        self._n_vocab = model.config.n_vocab

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        known = self._text[len(tokens) - self._n_prompt :][: min(limit, self._random.randrange(9))]
        return [self._random.randrange(self._n_vocab) if self._random.random() < self._error else t for t in known]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Engine of kernels, because NumPy's products depend on the number of rows."""
    return default_engine()


@pytest.fixture(scope="module")
def models(tiny_gguf: TinyGguf, plugins: Plugins, engine: Engine) -> Iterator[dict[str, Model]]:
    """Models of one vocabulary.

    With full attention, with sliding windows, with multi-token-prediction heads, with recurrent states, and models that
    draft.
    """
    options: dict[str, dict[str, Any]] = {
        "gqa": {}, "gemma3": {"n_layer": 6, "context_length": 400}, "glm4moe_nextn": {"n_layer": 2},
        "qwen35_nextn": {"n_layer": 3}, "mamba": {},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        files = {name: tiny_gguf(name, tokenizer="spm", **more) for name, more in options.items()}
        files["draft"] = tiny_gguf("gqa", tokenizer="spm", seed="draft")
        files["recurrent draft"] = tiny_gguf("qwen3next", tokenizer="spm")
        yield {
            name: stack.enter_context(load_model(file, plugins=plugins, engine=engine)) for name, file in files.items()
        }


def generated(
    session: Session, prompt: Sequence[int], params: SamplingParams | None, n: int, **options: Any
) -> dict[str, Any]:
    """Text of a session, with all state that speculation must not change.

    Recurrent states may be those before the last draft.
    """
    tokens = list(session.generate(prompt, params, max_tokens=n, ignore_eos=True, **options))
    n_cached = session.n_past if session.program.recurrent else session.n_cached
    return {
        "tokens": [(token.id, token.piece, token.logprobs) for token in tokens],
        "state": (session.tokens, n_cached, session.stop_string, session.stats.n_gen),
        "draws": session._sampler.draws,
        "logits": session.logits.tobytes() if session.has_logits else None,
    }


def prompt_of(model: Model, seed: int, n: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.config.n_vocab, n).tolist()


def plain(model: Model, prompt: Sequence[int], params: SamplingParams | None, n: int, seed: int = 1) -> dict[str, Any]:
    with model.create_session(seed=seed, n_ctx=SEQ_LEN, reuse=False) as session:
        return generated(session, prompt, params, n)


def ids(result: dict[str, Any]) -> list[int]:
    return [token for token, *_ in result["tokens"]]


@pytest.mark.slow
@examples(200)
@given(PARAMS, st.data())
def test_drafters_never_change_the_text(models: dict[str, Model], params: SamplingParams, data: st.DataObject) -> None:
    model = models[data.draw(st.sampled_from(["gqa", "gemma3", "glm4moe_nextn", "qwen35_nextn", "mamba"]))]
    seed, n = data.draw(st.integers(0, 999)), data.draw(st.integers(0, 90))
    prompt = prompt_of(model, seed)
    expected = plain(model, prompt, params, n, seed)
    error = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    with contextlib.ExitStack() as stack:
        drafters: list[Drafter] = [Mixed(ids(expected), len(prompt), seed, error), PromptLookup(min_ngram=1)]
        draft = models[data.draw(st.sampled_from(["draft", "recurrent draft"]))]
        drafters.append(stack.enter_context(DraftModel(draft, 5, min_probability=0.0)))
        if model.has_nextn:
            drafters.append(stack.enter_context(MtpHead(model, 5, min_probability=0.0)))
        for drafter in drafters:
            with model.create_session(seed=seed, n_ctx=SEQ_LEN, reuse=False) as session:
                assert generated(session, prompt, params, n, speculate=drafter) == expected
                assert session.stats.n_accepted <= session.stats.n_drafted
                if session.n_past == SEQ_LEN:
                    continue
                session.eval([5])
                with model.create_session(n_ctx=SEQ_LEN, reuse=False) as fresh:
                    fresh.eval(session.tokens)
                    np.testing.assert_array_equal(session.logits, fresh.logits)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("name", ["gqa", "gemma3", "qwen35_nextn", "mamba"])
@pytest.mark.parametrize("params", [None, SamplingParams(temperature=1.0)])
def test_right_drafts_save_passes(models: dict[str, Model], name: str, params: SamplingParams | None) -> None:
    model, drafts = models[name], 0
    prompt = prompt_of(model, 5)
    expected = plain(model, prompt, params, 60)
    drafter = Mixed(ids(expected), len(prompt), 0, 0.0)
    with model.create_session(seed=1, n_ctx=SEQ_LEN, reuse=False) as session:
        eval_ahead = session.eval_ahead

        def counted(token: int, draft: Sequence[int]) -> None:
            nonlocal drafts
            drafts += 1
            eval_ahead(token, draft)

        session.eval_ahead = counted
        assert generated(session, prompt, params, 60, speculate=drafter) == expected
        stats = session.stats
        assert stats.n_drafted == stats.n_accepted > 30
        assert 0 < drafts < 25
        assert session.n_computed == len(prompt) + 60


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=0.3)])
def test_drafts_with_lora_adapters(
    tiny_gguf: TinyGguf, plugins: Plugins, engine: Engine, tmp_path: Path, params: SamplingParams | None
) -> None:
    file = tiny_gguf("gqa", tokenizer="spm")
    lora = write_adapter(tmp_path / "lora.gguf", file)
    with load_model(file, plugins=plugins, engine=engine, lora_path=lora) as model, DraftModel(model, 4) as own:
        prompt = prompt_of(model, 8)
        expected = plain(model, prompt, params, 60)
        for drafter in (Mixed(ids(expected), len(prompt), 0, 0.2), PromptLookup(min_ngram=1), own):
            with model.create_session(seed=1, n_ctx=SEQ_LEN, reuse=False) as session:
                assert generated(session, prompt, params, 60, speculate=drafter) == expected
                assert session.stats.n_drafted or drafter is own
    with load_model(file, plugins=plugins, engine=engine) as model:
        assert plain(model, prompt, params, 60) != expected


def test_leaving_the_loop_drops_what_was_evaluated_ahead(models: dict[str, Model]) -> None:
    model = models["gemma3"]
    prompt = prompt_of(model, 3)
    text = ids(plain(model, prompt, None, 40))
    with model.create_session(seed=1, n_ctx=SEQ_LEN) as session:
        for i, _ in enumerate(session.generate(prompt, max_tokens=40, speculate=Mixed(text, len(prompt), 1, 0.2))):
            if i == 7:
                break
        assert session.tokens == (*prompt, *text[:7])
        assert list(session.cache.tokens) == list(session.tokens)
        assert [token.id for token in session.generate([], max_tokens=20)] == text[7:27]


def test_any_use_of_a_session_between_drops_the_draft(models: dict[str, Model]) -> None:
    model = models["gqa"]
    prompt = prompt_of(model, 4)
    text = ids(plain(model, prompt, None, 10))
    with model.create_session(n_ctx=SEQ_LEN, reuse=False) as session:
        session.eval(prompt)
        logits = session.logits.copy()
        session.eval_ahead(text[0], text[1:5])
        assert session.n_past == len(prompt) + 1
        assert session.is_ahead(text[1])
        assert not session.is_ahead(text[1] + 1)
        session.eval([text[1] + 1])
        assert not session.is_ahead(text[2])
        with model.create_session(n_ctx=SEQ_LEN, reuse=False) as other:
            other.eval([*prompt, text[0], text[1] + 1])
            np.testing.assert_array_equal(session.logits, other.logits)
        session.rewind(len(prompt) + 1)
        session.eval_ahead(text[1], text[2:4])
        session.rewind(len(prompt) - 1)
        assert not session.is_ahead(text[2])
        session.eval(prompt[-1:])
        np.testing.assert_array_equal(session.logits, logits)
        session.eval_ahead(text[0], text[1:5])
        fork = session.fork()
        assert not fork.is_ahead(text[1])
        fork.eval(text[1:2])
        session.eval(text[1:2])
        np.testing.assert_array_equal(session.logits, fork.logits)


def test_saved_states_hold_no_draft(models: dict[str, Model]) -> None:
    model = models["gqa"]
    prompt = prompt_of(model, 4)
    with model.create_session(n_ctx=SEQ_LEN, reuse=False) as session, model.create_session(n_ctx=SEQ_LEN) as other:
        session.eval_ahead(prompt[0], prompt[1:])
        other.load_state(session.save_state())
        assert other.tokens == tuple(prompt[:1])
        assert list(other.cache.tokens) == prompt[:1]


def test_the_drafter_of_a_session_is_its_default(models: dict[str, Model]) -> None:
    model = models["gqa"]
    prompt = prompt_of(model, 8)
    expected = plain(model, prompt, None, 60)
    with model.create_session(seed=1, n_ctx=SEQ_LEN, reuse=False) as session:
        session.drafter = PromptLookup(min_ngram=1)
        assert generated(session, prompt, None, 60) == expected
        assert session.stats.n_drafted


def test_lookup_continues_as_the_last_equal_ngram() -> None:
    lookup = PromptLookup(max_tokens=4)
    assert lookup.draft([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 9) == [4, 8, 1, 2]
    assert lookup.draft([1, 2, 3, 9, 1, 2, 4, 8, 9, 1, 2], 9) == [4, 8, 9, 1], "the longest n-gram, 9 1 2, is first"
    assert lookup.draft([1, 2, 3, 9, 1, 2, 4, 8, 9, 1, 2], 2) == [4, 8]
    assert lookup.draft([5, 6], 9) == []
    assert lookup.draft([7, 6, 7, 6], 9) == [7, 6, 7, 6], "a repetition goes on"


def test_lookup_takes_the_latest_of_the_longest_of_few_places() -> None:
    lookup = PromptLookup(max_tokens=1, max_ngram=3)
    assert lookup.draft([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2, 5, 9, 9, 1, 2, 6, 7, 1, 2], 1) == [5]
    far = [7, 1, 2, 3, *[8, 1, 2, 4] * 20, 7, 1, 2]
    lookup = PromptLookup(max_tokens=1, max_ngram=3)
    assert lookup.draft(far, 1) == [4]
    assert lookup.draft([*far[:8], 7, 1, 2], 1) == [3], "another context is indexed anew"


def test_lookup_in_a_growing_context_is_that_in_a_whole_one() -> None:
    numbers = random.Random(1)
    tokens = [numbers.randrange(6) for _ in range(300)]
    growing = PromptLookup(max_tokens=5, min_ngram=1)
    for n in range(1, 300):
        lookup = PromptLookup(max_tokens=5, min_ngram=1)
        assert growing.draft(tokens[:n], 5) == lookup.draft(tokens[:n], 5)


def test_a_predicted_text_is_drafted_from_its_beginning_to_its_end() -> None:
    prompt, text = [1, 2, 3], list(range(10, 30))
    drafter = PredictedText([3, *text], max_tokens=8)
    assert drafter.draft(prompt, 8) == [], "the first token has none before it that is of the text"
    assert drafter.draft([*prompt, 10], 8) == text[1:9]
    assert drafter.draft([*prompt, *text[:15]], 3) == text[15:18]
    assert drafter.draft([*prompt, *text[:15]], 0) == []
    assert drafter.draft([*prompt, *text], 8) == []
    assert PredictedText([3]).draft(prompt, 8) == PredictedText([]).draft([], 8) == []


def test_a_predicted_text_goes_on_behind_other_words() -> None:
    text = [5, 6, 100, 7, 8, 5, 6, 101, 7, 8, 5, 6, 102, 7, 8, 5, 6, 103, 9]
    context, drafter = [1, 5, 6], PredictedText([1, *text], max_tokens=2)
    assert drafter.draft(context, 2) == [100, 7]
    context += [200, 7, 8]
    assert drafter.draft(context, 2) == [5, 6], "the place that is nearest to the one expected"
    context += [5, 6]
    assert drafter.draft(context, 2) == [101, 7]
    assert drafter.draft([*context, 102, 7, 8], 2) == [5, 6]
    assert drafter.draft([*context, 102, 7, 8, 5, 6], 2) == [103, 9], "the longest of the near ones"


def test_a_predicted_text_compares_few_places() -> None:
    text = [7] * 5000
    drafter = PredictedText(text, max_tokens=4)
    compared = 0

    class Counted(list[int]):
        def __getitem__(self, key: Any) -> Any:
            nonlocal compared
            compared += 1
            return super().__getitem__(key)

    assert drafter.draft(Counted(text[:100]), 4) == [7] * 4
    assert compared < 200


@pytest.mark.parametrize("max_tokens", [0, -1, LIMIT_DRAFT + 1, 1.5, "4", True])
def test_invalid_lengths_of_drafts_are_refused(max_tokens: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"must be from 1 to {LIMIT_DRAFT}, not"):
        PromptLookup(max_tokens)


def test_invalid_settings_of_drafters_are_refused(models: dict[str, Model]) -> None:
    with pytest.raises(InvalidRequestError, match="n-grams of 3 to 2 tokens"):
        PromptLookup(min_ngram=3, max_ngram=2)
    with pytest.raises(InvalidRequestError, match=r"from 0 to 1, not 1\.5"):
        DraftModel(models["draft"], min_probability=1.5)
    with pytest.raises(InvalidRequestError, match=r"min_probability must be from 0 to 1, not -1"):
        MtpHead(models["glm4moe_nextn"], min_probability=-1)


def test_a_draft_model_with_another_vocabulary_is_refused_with_both_names(
    models: dict[str, Model], load_tiny: LoadTiny
) -> None:
    draft = load_tiny("gqa", "auto", metadata={"general.name": "small one"})
    with DraftModel(draft) as drafter, models["gqa"].create_session() as session:
        expected = f"the draft model 'small one' has another vocabulary than the model '{models['gqa'].name}'"
        with pytest.raises(InvalidRequestError, match=expected):
            session.generate([5, 6], speculate=drafter)
        assert session.n_past == 0
        assert [token.id for token in session.generate([5, 6], max_tokens=3, ignore_eos=True)]


@pytest.fixture
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft at any cost: tiny models are as fast as their heads."""
    monkeypatch.setattr(Drafts, "_best_length", lambda self, draft, limit, *_: limit)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    "name", ["glm4moe_nextn", "deepseek2_nextn", "bailing_nextn", "qwen35_nextn", "qwen3next_nextn"]
)
@pytest.mark.parametrize(
    "params",
    [None, SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, repeat_penalty=1.3, stop=("th",))],
)
def test_drafts_of_heads_never_change_the_text(
    name: str, params: SamplingParams | None, tiny_gguf: TinyGguf, plugins: Plugins, engine: Engine
) -> None:
    with (
        load_model(tiny_gguf(name, tokenizer="spm"), plugins=plugins, engine=engine) as model,
        MtpHead(model, 4, min_probability=0.0) as head,
    ):
        prompt = prompt_of(model, 6)
        expected = plain(model, prompt, params, 60)
        with model.create_session(seed=1, n_ctx=SEQ_LEN, reuse=False) as session:
            assert generated(session, prompt, params, 60, speculate=head) == expected
            assert session.stats.n_drafted > 3 * (len(expected["tokens"]) - 8)


def with_blocks_that_change_nothing(path: Path, *, reads: str) -> Path:
    """Model that sees the last token alone, and its head.

    The head reads the token or the hidden state alone. In the first case any token follows, in the second the same
    token again.
    """
    random = np.random.RandomState(1)
    n_vocab, n_embd = vocabulary_size("spm"), 64
    embd, output = random.normal(0, 0.1, (2, n_vocab, n_embd))
    identity, nothing = np.eye(n_embd), np.zeros((n_embd, n_embd))
    tensors = {"token_embd.weight": embd, "output.weight": output if reads == "token" else embd}
    tensors |= {f"blk.{i}.attn_output.weight": nothing for i in range(3)}
    tensors |= {f"blk.{i}.ffn_down.weight": np.zeros((n_embd, 96)) for i in range(3)}
    tensors["blk.2.nextn.eh_proj.weight"] = np.hstack([identity, nothing] if reads == "token" else [nothing, identity])
    norms = "output_norm", *(f"blk.2.nextn.{name}" for name in ("enorm", "hnorm", "shared_head_norm"))
    tensors |= {f"{name}.weight": np.ones(n_embd) for name in norms}
    return tiny_variants.write(path, "glm4_nextn", tokenizer="spm", tensors=tensors)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("reads", ["token", "hidden state"])
def test_all_drafts_of_a_head_that_knows_the_model_come(
    reads: str, tmp_path: Path, plugins: Plugins, engine: Engine
) -> None:
    path = with_blocks_that_change_nothing(tmp_path / "m.gguf", reads=reads)
    with load_model(path, plugins=plugins, engine=engine) as model, MtpHead(model, 5, min_probability=0.0) as head:
        prompt = prompt_of(model, 7)
        expected = plain(model, prompt, None, 60)
        assert len(set(ids(expected))) == 1 or reads == "token"
        with model.create_session(seed=1, n_ctx=SEQ_LEN, reuse=False) as session:
            assert generated(session, prompt, None, 60, speculate=head) == expected
            assert session.stats.n_accepted == session.stats.n_drafted == 49
            assert session.n_computed == len(prompt) + 60


@pytest.mark.usefixtures("always_drafts")
def test_the_cache_of_a_head_follows_the_session(models: dict[str, Model]) -> None:
    model = models["glm4moe_nextn"]
    prompt = prompt_of(model, 9)
    with model.create_session(n_ctx=SEQ_LEN) as session, MtpHead(model, 4, min_probability=0.0) as head:
        session.drafter = head

        def expect_cells(first: int, session: Session, head: MtpHead = head) -> None:
            start, tokens = head._context.cells
            assert start == first
            assert tokens == session.tokens[first : first + len(tokens)]
            assert first + len(tokens) >= session.n_past - 16

        session.eval(prompt[:5])
        assert [*session.generate(prompt[5:], max_tokens=10, ignore_eos=True)]
        expect_cells(0, session)
        session.rewind(20)
        eval_batch([(session, prompt[:20])])
        expect_cells(0, session)
        assert [*session.generate([], max_tokens=10, ignore_eos=True)]
        expect_cells(0, session)
        known = list(session.tokens)
        with model.create_session(n_ctx=SEQ_LEN) as other, MtpHead(model, 4, min_probability=0.0) as second:
            other.drafter = second
            assert [*other.generate([*known[:30], *prompt], max_tokens=5, ignore_eos=True)]
            expect_cells(30, other, second)
            assert other.stats.n_drafted > 0


def test_the_head_of_another_model_is_refused(models: dict[str, Model]) -> None:
    message = "is that of the model 'tiny glm4moe', not of 'tiny llama'"
    with MtpHead(models["glm4moe_nextn"]) as head, models["gqa"].create_session() as session:
        session.drafter = head
        session.eval([5, 6])
        with pytest.raises(InvalidRequestError, match=message):
            session.generate([7])


def test_a_head_that_was_closed_takes_nothing(models: dict[str, Model]) -> None:
    model = models["glm4moe_nextn"]
    with model.create_session() as session:
        with MtpHead(model) as head:
            session.drafter = head
        session.eval(prompt_of(model, 1))


def test_a_predicted_text_of_a_whole_context_has_no_index() -> None:
    text = [3, *(number % 1009 for number in range(131_000))]
    with calls_at_most(200):
        drafter = PredictedText(text, max_tokens=4)
        assert drafter.draft(text[:3], 4) == text[3:7]
        assert drafter.draft([*text[:3], 9], 4) == []
        assert drafter.draft([*text[:3], 9, *text[400:410]], 4) == text[410:414]
