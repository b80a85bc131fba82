"""Contexts of encoder-decoder models: a text, then the decoder's tokens."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from adapters import write_adapter
from conftest import LoadTiny, TinyGguf
from llamacli import ContextOverflowError, Inputs, InvalidRequestError, Model, Session, eval_batch, load_model
from llamacli.engine import Engine
from llamacli.generation.drafters import PromptLookup
from llamacli.kv import N_BATCH
from llamacli.loaders import open_model_file
from llamacli.plugins import Plugins
from llamacli.tools.embedding import load_embedder

TEXT = [5, 9, 1, 77, 30, 2, 64, 8, 19, 3, 40, 41, 6, 11, 90, 100, 4, 27, 3, 3]
OTHER = [*TEXT[:17], 99, 3, 3]
DECODED = [7, 50, 12, 3, 88, 20]


@pytest.fixture
def model(load_tiny: LoadTiny) -> Iterator[Model]:
    with load_tiny("t5") as model:
        yield model


def begun(model: Model, text: list[int] = TEXT, decoded: list[int] | None = None, **options: object) -> Session:
    session = model.create_session(**{"reuse": False} | options)
    session.eval(model.encoder_inputs(text))
    session.eval(decoded or [])
    return session


def logits(model: Model, text: list[int] = TEXT, decoded: list[int] | None = None) -> np.ndarray:
    with begun(model, text, decoded) as session:
        return session.logits.copy()


def test_a_context_is_the_text_the_start_token_and_the_decoders(model: Model) -> None:
    start = model.config.decoder_start
    rows = model.logits(model.encoder_inputs(TEXT, [start, *DECODED]))
    assert rows.shape == (1 + len(DECODED), 128)  # the text for the encoder has none
    with model.create_session(reuse=False) as session:
        assert session.eval(model.encoder_inputs(TEXT), all_logits=True).shape == (1, 128)
        assert session.n_past == len(TEXT) + 1
        for token, row in zip(DECODED, rows, strict=False):
            np.testing.assert_array_equal(session.logits, row)
            session.eval([token])
        np.testing.assert_array_equal(session.logits, rows[-1])
    assert np.abs(logits(model, OTHER) - rows[0]).max() > 1e-3
    assert np.abs(logits(model, TEXT[::-1]) - rows[0]).max() > 1e-3


def test_engines_agree_on_texts_of_all_lengths(tiny_gguf: TinyGguf, plugins: Plugins, model: Model) -> None:
    with load_model(tiny_gguf("t5"), "fp32", plugins=plugins) as native:
        for n in (1, 15, 16, 17, 64, 150):  # around the borders of pages and tiles, and beyond the last bucket
            text = np.random.default_rng(n).integers(0, 128, n).tolist()
            expected, found = (one.logits(one.encoder_inputs(text, DECODED)) for one in (model, native))
            np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


class TestSequences:
    """Forks, rewinds, saved states, prefixes."""

    def test_forks_keep_the_text(self, model: Model) -> None:
        with begun(model, TEXT, DECODED[:2]) as session, session.fork() as fork:
            fork.eval([1, 2])
            session.eval(DECODED[2:])
            np.testing.assert_array_equal(fork.logits, logits(model, TEXT, [*DECODED[:2], 1, 2]))
            np.testing.assert_array_equal(session.logits, logits(model, TEXT, DECODED))

    def test_rewinding_keeps_the_text_or_drops_it_whole(self, model: Model) -> None:
        with begun(model, TEXT, DECODED) as session:
            session.rewind(len(TEXT) + 3)
            session.eval([1])
            np.testing.assert_array_equal(session.logits, logits(model, TEXT, [*DECODED[:2], 1]))
            session.rewind(len(TEXT))  # another token than the decoder's first
            session.eval([9])
            expected = model.logits(model.encoder_inputs(TEXT, [9]))
            np.testing.assert_array_equal(session.logits, expected[-1])
            with pytest.raises(InvalidRequestError, match=r"4 tokens end within the span of tokens 0 to 19"):
                session.rewind(4)
            session.rewind(0)
            session.eval(model.encoder_inputs(OTHER))
            np.testing.assert_array_equal(session.logits, logits(model, OTHER))

    def test_saved_states_hold_the_text(self, model: Model, tmp_path: Path) -> None:
        with begun(model, TEXT, DECODED[:3]) as session, model.create_session(reuse=False) as loaded:
            session.save(tmp_path / "state")
            loaded.load(tmp_path / "state")
            loaded.eval(DECODED[3:])
            np.testing.assert_array_equal(loaded.logits, logits(model, TEXT, DECODED))
            loaded.rewind(0)
            loaded.eval(model.encoder_inputs(TEXT))  # the keys of the text are known
            np.testing.assert_array_equal(loaded.logits, logits(model, TEXT))
        with model.kv_cache(2) as cache:
            with Session(model, sequence=cache.sequence(0), reuse=False) as first:
                first.eval(model.encoder_inputs(TEXT))
                cache.state_load(1, cache.state_save(0))
            with Session(model, sequence=cache.sequence(1), reuse=False) as second:
                second.eval(DECODED)
                np.testing.assert_array_equal(second.logits, logits(model, TEXT, DECODED))

    def test_prefixes_are_shared_with_the_same_text_only(self, model: Model) -> None:
        with begun(model, TEXT, DECODED, reuse=True):
            for text, n_reused in ((OTHER, 0), (TEXT, len(TEXT)), (TEXT[:17], 0), ([*TEXT, 5], 0)):
                with begun(model, text, reuse=True) as session:
                    assert session.n_reused == n_reused
                    np.testing.assert_array_equal(session.logits, logits(model, text))
            inputs = model.encoder_inputs(TEXT, [model.config.decoder_start, *DECODED[:3], 1])
            with model.create_session() as session:
                session.eval(inputs)
                assert session.n_reused == len(TEXT) + 4
                np.testing.assert_array_equal(session.logits, logits(model, TEXT, [*DECODED[:3], 1]))

    @pytest.mark.parametrize("strategy", ["disabled", "long_sequence_only"])
    def test_a_text_that_is_not_cached_is_encoded_again(self, strategy: str, model: Model) -> None:
        with begun(model, TEXT, DECODED, strategy=strategy) as session:
            assert session.n_cached == 0
            np.testing.assert_array_equal(session.logits, logits(model, TEXT, DECODED))

    @pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
    def test_cache_types_round_the_keys_of_the_text_too(self, kv_type: str, model: Model) -> None:
        with begun(model, TEXT, DECODED, kv_type=kv_type) as session:
            error = np.abs(session.logits - logits(model, TEXT, DECODED)).max()
        assert 0 < error < 0.3


class TestBatches:
    """Several sequences in one batch, with texts of their own."""

    def test_steps_of_other_texts_change_nothing(self, model: Model) -> None:
        texts = [TEXT, OTHER, TEXT[:3]]
        sessions = [model.create_session(reuse=False) for _ in texts]
        late = begun(model, TEXT[5:], DECODED[:1])
        eval_batch([(one, model.encoder_inputs(text)) for one, text in zip(sessions, texts, strict=True)])
        eval_batch([*((one, DECODED) for one in sessions), (late, DECODED[1:])])
        for one, text in zip([*sessions, late], [*texts, TEXT[5:]], strict=True):
            np.testing.assert_array_equal(one.logits, logits(model, text, DECODED))
            one.close()

    def test_texts_that_fill_several_batches(self, model: Model) -> None:
        texts = [np.random.default_rng(i).integers(0, 128, 220).tolist() for i in range(4)]
        sessions = [model.create_session(reuse=False) for _ in texts]
        with begun(model, TEXT) as decoding:
            work = [(one, model.encoder_inputs(text)) for one, text in zip(sessions, texts, strict=True)]
            eval_batch([work[0], (decoding, DECODED), *work[1:]])
            np.testing.assert_array_equal(decoding.logits, logits(model, TEXT, DECODED))
        for one, text in zip(sessions, texts, strict=True):
            np.testing.assert_array_equal(one.logits, logits(model, text))
            one.close()

    def test_generated_texts_are_those_of_single_prompts(self, model: Model) -> None:
        prompts = [TEXT, OTHER, TEXT[:1]]
        for prompt, generated in zip(prompts, model.generate(prompts, max_tokens=7), strict=True):
            with model.create_session() as session:
                assert [token.id for token in session.generate(prompt, max_tokens=7)] == [*generated.tokens]


class TestGeneration:
    """Prompts of `generate` and completions."""

    def test_the_first_prompt_is_the_encoders(self, model: Model) -> None:
        with model.create_session() as session, begun(model) as alone:
            tokens = [token.id for token in session.generate(TEXT, max_tokens=6)]
            assert tokens == [token.id for token in alone.generate([], max_tokens=6)]
            assert session.n_past == len(TEXT) + 1 + 6
            more = [token.id for token in session.generate([3], max_tokens=2)]
            alone.eval([3])
            assert more == [token.id for token in alone.generate([], max_tokens=2)]

    def test_drafts_change_nothing(self, model: Model) -> None:
        with model.create_session() as session, model.create_session(reuse=False) as drafted:
            expected, found = (
                [token.id for token in one.generate(TEXT, max_tokens=40, ignore_eos=True, speculate=drafter)]
                for one, drafter in ((session, None), (drafted, PromptLookup()))
            )
        assert found == expected

    def test_completions(self, model: Model) -> None:
        result = model.create_completion(TEXT, max_tokens=6, temperature=0.0)
        with model.create_session() as session:
            text = "".join(token.piece for token in session.generate(TEXT, max_tokens=6))
        assert result["choices"][0]["text"] == text
        assert result["usage"]["prompt_tokens"] == len(TEXT)

    def test_only_the_encoders_text_ends_with_eos(self, load_tiny: LoadTiny) -> None:
        keys = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 2}
        with load_tiny("t5", tokenizer="spm", metadata=keys) as model, model.create_session() as session:
            ids = session.encode("once upon")
            assert ids[-1] == 2
            assert model.encode_prompt("once upon") == ids
            assert model.encoder_inputs("once upon").ids.tolist() == [*ids, 0]
            session.eval(model.encoder_inputs(ids))
            assert 2 not in session.encode("a time")


class TestInputs:
    """Texts that cannot be evaluated, and texts of embeddings."""

    def test_what_is_missing_or_too_long_is_named(self, model: Model) -> None:
        with pytest.raises(InvalidRequestError, match="no token for the encoder"):
            model.encoder_inputs([])
        with pytest.raises(InvalidRequestError, match="no token for the decoder"):
            model.encoder_inputs(TEXT, [])
        with pytest.raises(InvalidRequestError, match=f"encoder takes at most {N_BATCH} tokens at once, not 513"):
            model.encoder_inputs([1] * (N_BATCH + 1))
        with pytest.raises(InvalidRequestError, match="no token for the encoder"):
            model.generate([TEXT, []])
        with model.create_session(n_ctx=20) as session:
            for prompt in (TEXT, model.encoder_inputs(TEXT)):
                with pytest.raises(ContextOverflowError):
                    list(session.generate(prompt))
            assert session.n_past == 0

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ([1, 2], "its context begins with a text for it, see Model.encoder_inputs"),
            (Inputs.of([1, 2, 3], spans=[(1, 3)]), "takes one span, its text"),
            (Inputs.of([1, 2, 3], spans=[(0, 3)]), "a token of the decoder must follow"),
            (Inputs.of([1, 2, 3, 4], spans=[(0, 1), (1, 3)]), "takes one span, its text"),
            (Inputs.of([1, 2, 3], spans=[(0, 2)], positions=[0, 1, 2]), "no explicit positions"),
            (Inputs.of([1, 200, 3], spans=[(0, 2)]), "token 200 is not an id from 0 to 127"),
        ],
    )
    def test_contexts_without_one_text_are_refused(
        self, inputs: Inputs | list[int], message: str, model: Model
    ) -> None:
        with model.create_session() as session, begun(model) as other:
            with pytest.raises(InvalidRequestError, match=message):
                session.eval(inputs)
            with pytest.raises(InvalidRequestError, match=message):
                eval_batch([(other, DECODED), (session, inputs)])
            with pytest.raises(InvalidRequestError, match=message):
                model.logits(inputs)
            assert (session.n_past, other.n_past) == (0, len(TEXT) + 1)
            session.eval(model.encoder_inputs(TEXT))
            np.testing.assert_array_equal(session.logits, logits(model))

    def test_a_second_text_and_a_shifted_context_are_refused(self, model: Model) -> None:
        with begun(model, TEXT, DECODED) as session:
            before = session.tokens
            with pytest.raises(InvalidRequestError, match="takes one span, its text"):
                session.eval(model.encoder_inputs(OTHER))
            with pytest.raises(InvalidRequestError, match="cannot move up: rewind it"):
                session.remove_range(len(TEXT) + 1, len(TEXT) + 2)
            with pytest.raises(InvalidRequestError, match="text for the encoder, which tokens cannot replace"):
                session.clear_and_reseed([1], [2])
            assert session.tokens == before
            session.eval([4])
            np.testing.assert_array_equal(session.logits, logits(model, TEXT, [*DECODED, 4]))

    def test_a_text_of_embeddings(self, tiny_gguf: TinyGguf, model: Model) -> None:
        table = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
        ids = [*TEXT[:4], 0]
        given = Inputs.of(ids, embeddings=table[:2], rows=[1, 2], spans=[(0, 4)])
        other = Inputs.of(ids, embeddings=table[2:4], rows=[1, 2], spans=[(0, 4)])
        assert given.keys != other.keys
        first, again, second = (model.logits(one) for one in (given, given, other))
        np.testing.assert_array_equal(first, again)
        assert np.abs(first - second).max() > 1e-3

    def test_other_models_have_no_encoder(self, load_tiny: LoadTiny) -> None:
        with load_tiny("gqa") as model:
            assert model.prompt_inputs(TEXT) == TEXT
            with pytest.raises(InvalidRequestError, match="has no encoder"):
                model.encoder_inputs(TEXT)

    def test_embeddings_of_the_decoder_are_refused(self, tiny_gguf: TinyGguf, plugins: Plugins, engine: Engine) -> None:
        embedder = load_embedder(tiny_gguf("t5"), "fp32", plugins=plugins, engine=engine)
        with embedder, pytest.raises(InvalidRequestError, match="this model has an encoder"):
            embedder.embed(TEXT)


def test_adapters_change_both_parts(tiny_gguf: TinyGguf, model: Model, tmp_path: Path) -> None:
    plain = logits(model)
    for part in ("enc.blk.", "dec.blk."):
        chosen = {name for name in open_model_file(tiny_gguf("t5"), []).tensors if part in name and "rel_b" not in name}
        path = write_adapter(tmp_path / f"{part}gguf", tiny_gguf("t5"), chosen=chosen.__contains__)
        adapters = [(model.load_adapter(path), 1.0)]
        with model.create_session(adapters=adapters) as session:
            session.eval(model.encoder_inputs(TEXT))
            assert np.abs(session.logits - plain).max() > 1e-3
