"""Prompts by tiles: ways of tokens in sessions and chats.

On CPUs without AMX the reference engine shows the same, by simulated tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import InvalidRequestError, Model, PromptLookup, SamplingParams, StateError, load_model
from llamacli.engine import Prompts, ReferenceEngine, native
from llamacli.engine.batching import Chunk, evaluate
from llamacli.engine.native import NativeEngine
from llamacli.generation.stream import eval_batch
from llamacli.inputs import cell_keys, is_generated, is_in_span, is_positioned, tokens_of
from llamacli.kernels.isa import isa
from llamacli.kv import KVSequence
from llamacli.plugins import Plugins
from llamacli.testing.chats import CHATML
from sessions import LONG, fresh
from tiny_chat import chat_keys

TOKENS, REPLY, MORE = LONG[:37], LONG[40:46], LONG[50:60]
GREEDY = SamplingParams()

ENGINES = [
    pytest.param(ReferenceEngine, id="reference"),
    pytest.param(
        lambda prompts: NativeEngine(2, prompts=prompts),
        id="native",
        marks=pytest.mark.skipif(isa() != "amx", reason="the instruction set in use has no tiles"),
    ),
]


@pytest.fixture(scope="module", params=ENGINES)
def make_engine(request):
    return request.param


@pytest.fixture(scope="module", params=["gqa", "gemma3", "qwen35"])
def models(request, make_engine, tiny_gguf: TinyGguf, plugins: Plugins) -> Iterator[dict[str, Model]]:
    """Full attention, sliding windows, recurrent states; by tiles and by registers."""
    path = tiny_gguf(request.param)
    made = {way: load_model(path, "q8", plugins=plugins, engine=make_engine(way)) for way in Prompts}
    yield made
    for model in made.values():
        model.close()


@pytest.fixture
def tiled(models: dict[str, Model]) -> Model:
    return models[Prompts.TILES]


def after(model: Model, prompt: list[int], generated: list[int]) -> np.ndarray:
    """Logits after a prompt and generated tokens."""
    with fresh(model, prompt) as session:
        for token in generated:
            session.eval([token], generated=True)
        return session.logits.copy()


def test_keys_of_generated_tokens_are_their_own() -> None:
    keys = cell_keys([5, -9, 0, (1 << 31) - 1], 2)
    assert keys[:2] == [5, -9]
    assert [is_generated(key) for key in keys] == [False, False, True, True]
    assert not any(is_in_span(key) or is_positioned(key) for key in keys[2:])
    assert min(keys) >= -(1 << 63)
    assert not is_generated(~((1 << 62) - 1)), "the largest digest"
    assert tokens_of(keys) == ([5, -9, 0, (1 << 31) - 1], 2)


@pytest.mark.parametrize("cuts", [(1,), (16, 17), (5, 20, 36)])
def test_a_prompt_in_pieces_equals_the_whole(tiled: Model, cuts: tuple[int, ...]) -> None:
    whole = fresh(tiled, TOKENS).logits
    with tiled.create_session(reuse=False) as session:
        for first, last in zip((0, *cuts), (*cuts, len(TOKENS)), strict=True):
            session.eval(TOKENS[first:last])
        np.testing.assert_array_equal(session.logits, whole)


def test_ways_differ(models: dict[str, Model]) -> None:
    """So the other tests can fail."""
    tiled, plain = models[Prompts.TILES], models[Prompts.REGISTERS]
    by_tiles, by_registers = fresh(tiled, TOKENS).logits, fresh(plain, TOKENS).logits
    assert (by_tiles != by_registers).any()
    assert np.mean((by_tiles - by_registers) ** 2) < 1e-2 * np.var(by_registers)
    assert (after(tiled, TOKENS, REPLY) != fresh(tiled, TOKENS + REPLY).logits).any()
    np.testing.assert_array_equal(after(plain, TOKENS, REPLY), fresh(plain, TOKENS + REPLY).logits)
    assert (tiled.variant, plain.variant) == ("q8-tiles", "q8")


def test_a_reply_in_a_prompt_is_evaluated_again(tiled: Model) -> None:
    expected = fresh(tiled, TOKENS + REPLY + MORE).logits
    with tiled.create_session() as session:
        session.eval(TOKENS)
        for token in REPLY:
            session.eval([token], generated=True)
        n = session.n_computed
        np.testing.assert_array_equal(session.logits, after(tiled, TOKENS, REPLY))
        session.eval(MORE)
        np.testing.assert_array_equal(session.logits, expected)
        n_least = len(REPLY + MORE)
        assert n_least <= session.n_computed - n <= (n_least if tiled.arch == "llama" else len(TOKENS) + n_least)
        assert session.tokens == (*TOKENS, *REPLY, *MORE)
        assert session.cache.tokens == TOKENS + REPLY + MORE


def test_one_token_of_a_prompt_evaluates_a_reply_again(tiled: Model) -> None:
    with fresh(tiled, TOKENS) as session:
        session.eval(REPLY[:1], generated=True)
        session.eval(MORE[:1])
        np.testing.assert_array_equal(session.logits, fresh(tiled, [*TOKENS, REPLY[0], MORE[0]]).logits)


def test_prefixes_are_shared_within_a_way(tiled: Model) -> None:
    prompt, whole = LONG[20:60], LONG[20:60] + REPLY + MORE  # of no other test
    with tiled.create_session() as session, tiled.create_session() as other:
        session.eval(prompt)
        for token in REPLY:
            session.eval([token], generated=True)
        other.eval(whole)
        assert other.n_reused <= len(prompt)
        np.testing.assert_array_equal(other.logits, fresh(tiled, whole).logits)
    with tiled.create_session() as third:
        third.eval(whole + TOKENS)
        assert third.n_reused == len(whole), "of the second session, which had it as a prompt"
        np.testing.assert_array_equal(third.logits, fresh(tiled, whole + TOKENS).logits)


def test_a_batch_of_prompts_and_generated_tokens_equals_each_alone(tiled: Model) -> None:
    prompts = [TOKENS, TOKENS[:9], TOKENS[:20]]
    sessions = [fresh(tiled, prompt) for prompt in prompts]
    work = [REPLY[:1], MORE, REPLY[1:2]]
    ways = [True, False, True]
    eval_batch(zip(sessions, work, strict=True), generated=ways)
    for session, prompt, tokens, way in zip(sessions, prompts, work, ways, strict=True):
        expected = after(tiled, prompt, tokens) if way else fresh(tiled, prompt + tokens).logits
        np.testing.assert_array_equal(session.logits, expected)
    with pytest.raises(InvalidRequestError, match="generated has 1 entries for 2 sessions"):
        eval_batch(zip(sessions[:2], work[:2], strict=True), generated=[True])


def test_a_chunk_of_both_ways(tiled: Model) -> None:
    """Cells that were dropped are computed again as they were."""
    expected = after(tiled, TOKENS, REPLY)
    sequence = KVSequence(tiled.kv_pool(), 64)
    (rows,) = evaluate(tiled.program_with, [Chunk(sequence, TOKENS + REPLY, n_generated=len(REPLY))])
    np.testing.assert_array_equal(rows[-1], expected)
    assert sequence.tokens == cell_keys(TOKENS + REPLY, len(TOKENS))
    sequence.close()
    with tiled.create_session(strategy="disabled", reuse=False) as session:
        session.eval(TOKENS)
        for token in REPLY:
            session.eval([token], generated=True)
        np.testing.assert_array_equal(session.logits, expected)


def test_generation_forks_and_states_keep_the_ways(tiled: Model) -> None:
    with tiled.create_session() as session:
        reply = [token.id for token in session.generate(TOKENS, GREEDY, max_tokens=6, ignore_eos=True)]
        np.testing.assert_array_equal(session.logits, after(tiled, TOKENS, reply))
        state = session.save_state()
        with session.fork() as fork, tiled.create_session(reuse=False) as loaded:
            loaded.load_state(state)
            for other in (fork, loaded):
                other.eval(REPLY[:1], generated=True)
                np.testing.assert_array_equal(other.logits, after(tiled, TOKENS, [*reply, REPLY[0]]))
                other.rewind(len(TOKENS) + 2)
                other.eval(REPLY[:1], generated=True)
                np.testing.assert_array_equal(other.logits, after(tiled, TOKENS, [*reply[:2], REPLY[0]]))
                other.eval(MORE)
                expected = fresh(tiled, [*TOKENS, *reply[:2], REPLY[0], *MORE]).logits
                np.testing.assert_array_equal(other.logits, expected)


def test_drafts_change_no_text(tiled: Model) -> None:
    prompt = (LONG[:6] * 5)[:27]
    with tiled.create_session() as session, tiled.create_session() as drafted:
        plain = [token.id for token in session.generate(prompt, GREEDY, max_tokens=20, ignore_eos=True)]
        lookup = PromptLookup(min_ngram=1)
        found = [
            token.id for token in drafted.generate(prompt, GREEDY, max_tokens=20, ignore_eos=True, speculate=lookup)
        ]
        assert found == plain
        np.testing.assert_array_equal(drafted.logits, session.logits)


def test_a_draft_is_not_a_prompt(tiled: Model) -> None:
    with fresh(tiled, TOKENS) as session:
        session.eval_ahead(REPLY[0], MORE[:3])
        session.eval(MORE[:1])
        np.testing.assert_array_equal(session.logits, fresh(tiled, [*TOKENS, REPLY[0], MORE[0]]).logits)


def test_generated_batches_equal_sessions(tiled: Model) -> None:
    prompts = [TOKENS, TOKENS[:9], TOKENS[5:30]]
    results = tiled.generate(prompts, GREEDY, max_tokens=7, n_parallel=2)
    for prompt, result in zip(prompts, results, strict=True):
        with tiled.create_session(reuse=False) as session:
            expected = [token.id for token in session.generate(prompt, GREEDY, max_tokens=7)]
        assert list(result.tokens) == expected


def test_states_are_of_one_way(models: dict[str, Model]) -> None:
    with models[Prompts.TILES].create_session() as session, models[Prompts.REGISTERS].create_session() as other:
        session.eval(TOKENS)
        with pytest.raises(StateError):
            other.load_state(session.save_state())


def test_a_second_turn_is_that_of_its_whole_text(make_engine, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    """The first reply is part of its prompt then."""
    path = tiny_gguf(tokenizer="spm", metadata=chat_keys(CHATML))
    with load_model(path, "q8", plugins=plugins, engine=make_engine(Prompts.TILES)) as model:
        with model.create_chat(max_tokens=8) as chat:
            for question in ("a ball", "and a dog"):
                chat.add_user(question)
                prompt = chat.render_turn()
                reply = "".join(piece.text for piece in chat.respond())
        with model.create_session(reuse=False) as session:
            session.eval(prompt)
            again = "".join(token.piece for token in session.generate([], GREEDY, max_tokens=8))
        assert again.startswith(reply)
        assert reply


def test_errors(monkeypatch: pytest.MonkeyPatch, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with pytest.raises(InvalidRequestError, match="prompts 'fast' is not one of registers, tiles"):
        load_model(tiny_gguf(), prompts="fast", plugins=plugins)
    with pytest.raises(InvalidRequestError, match="prompts 'tiles': the given engine has prompts 'registers'"):
        load_model(tiny_gguf(), prompts="tiles", plugins=plugins, engine=ReferenceEngine())
    monkeypatch.setattr(native, "isa", lambda: "avx512")
    monkeypatch.setattr(native, "available", lambda: ("generic", "avx2", "avx512"))
    message = "'tiles' needs AMX, permitted by the system, and this CPU runs generic, avx2, avx512; avx512 is in use"
    with pytest.raises(InvalidRequestError, match=message):
        NativeEngine(1, prompts=Prompts.TILES)
