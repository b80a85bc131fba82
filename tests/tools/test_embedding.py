"""Text embeddings, compared with llama.cpp's."""

from pathlib import Path

import numpy as np
import pytest

import tiny_variants
from adapters import write_adapter
from conftest import first_variants
from llamacli.engine import ReferenceEngine, default_engine
from llamacli.errors import ClosedError, EmbeddingModelError, InvalidRequestError, ModelFormatError, PluginError
from llamacli.graph import Graph, Param, Tensor
from llamacli.hub.demo import demo_path
from llamacli.kv import N_BATCH
from llamacli.ops.linear import Linear
from llamacli.ops.rms_norm import RmsNorm
from llamacli.ops.softcap import Softcap
from llamacli.testing import formulas
from llamacli.tools.embedding import Embedder, Pooling, load_embedder
from oracle import embeddings
from oracle.goldens import TOKENS
from suite import slow_but


@pytest.fixture
def load(tiny_gguf, plugins, engine):
    """Load a tiny model for embeddings: `load(variant, mode, **options)`."""

    def load(variant: str = "gqa", mode: str = "fp32", **options) -> Embedder:
        return load_embedder(tiny_gguf(variant, **options), mode, plugins=plugins, engine=engine)

    return load


def check_vectors(embedder: Embedder, golden: Path, variant: str, bound: float) -> None:
    """Compare the vectors of each pooling."""
    for pooling in embeddings.POOLINGS:
        expected = np.load(golden)[f"{variant}-{pooling}"]
        found = embedder.embed(TOKENS, pooling=pooling, normalize=False)
        assert (found.dtype, found.shape) == (np.float32, expected.shape), pooling
        assert formulas.nmse(found, expected) < bound, pooling


@pytest.mark.parametrize("variant", embeddings.VARIANTS)
def test_vectors_match_llama_cpp(load, variant: str) -> None:
    check_vectors(load(variant), embeddings.GOLDEN, variant, tiny_variants.VARIANTS[variant].exact)


@pytest.mark.parametrize("variant", slow_but(first_variants(tiny_variants.ENCODERS), tiny_variants.ENCODERS))
def test_vectors_of_encoders_match_llama_cpp(load, variant: str) -> None:
    made = tiny_variants.ENCODERS[variant]
    if "type" not in made.options:
        check_vectors(load(variant), embeddings.ENCODERS_GOLDEN, variant, made.exact)
    check_vectors(load(variant, "auto"), embeddings.ENCODERS_GOLDEN, variant, 5e-3)


class TestEncoders:
    """Models that attend in both directions."""

    def test_sessions_and_caches_are_refused(self, load_tiny) -> None:
        model = load_tiny("bert")
        with pytest.raises(EmbeddingModelError, match="attend to later ones, so it cannot generate text"):
            model.create_session()

    def test_later_tokens_change_earlier_vectors(self, load) -> None:
        embedder = load("bert")
        first, second = (embedder.embed(tokens, pooling="cls") for tokens in ([5, 9, 1], [5, 9, 2]))
        assert np.abs(first - second).max() > 1e-3

    def test_texts_that_share_batches_have_the_same_bits(self, load) -> None:
        embedder, random = load("bert"), np.random.default_rng(0)
        most = embedder.max_tokens
        sizes = [3, most // 2, 1, 1, most, 40, most, 12] * (1 + N_BATCH // (4 * most))
        texts = [random.integers(0, embedder.model.config.n_vocab, n).tolist() for n in sizes]
        for pooling in (Pooling.MEAN, Pooling.CLS, Pooling.NONE):
            found = list(embedder.vectors(texts, pooling=pooling))
            assert len(found) == len(texts)
            for tokens, vector in zip(texts, found, strict=True):
                np.testing.assert_array_equal(vector, embedder.embed(tokens, pooling=pooling))

    def test_texts_before_an_invalid_one_have_their_vectors(self, load) -> None:
        vectors = load("bert").vectors([[5, 9], [1], [-1], [2]])
        assert [next(vectors).shape, next(vectors).shape] == [(64,)] * 2
        with pytest.raises(InvalidRequestError, match="token -1 at index 0"):
            next(vectors)

    def test_longer_texts_than_a_batch_are_refused(self, load) -> None:
        short, long = load("bert"), load("nomic_bert", context_length=2048)
        assert (short.max_tokens, long.max_tokens) == (64, 512)
        assert long.embed([3] * 512).shape == (64,)
        for embedder, n in ((short, 65), (long, 513)):
            with pytest.raises(InvalidRequestError, match=f"the text has {n} tokens; .* at most {n - 1} at once"):
                embedder.embed([3] * n)

    def test_tokens_outside_of_the_vocabulary_are_refused(self, load) -> None:
        with pytest.raises(InvalidRequestError, match="token 128 at index 1 is not an id from 0 to 127"):
            load("bert").embed([1, 128])

    def test_no_memory_is_kept(self, load) -> None:
        embedder = load("gemma_embedding")
        embedder.embed(TOKENS)
        assert embedder.model.kv_pool("f32").n_bytes == 0


def test_adapters_change_the_vectors_of_encoders(tiny_gguf, plugins, engine, tmp_path) -> None:
    path = tiny_gguf("bert")
    chosen = ("attn_q.weight", "attn_qkv.weight", "ffn_up.weight")
    lora = write_adapter(tmp_path / "a.gguf", path, chosen=lambda name: name.endswith(chosen))
    vectors = []
    for scale in (0.0, 0.5, 1.0):
        options = {"plugins": plugins, "engine": engine, "lora_path": lora, "lora_scale": scale}
        with load_embedder(path, "fp32", **options) as embedder:
            vectors.append(embedder.embed(TOKENS))
    with load_embedder(path, "fp32", plugins=plugins, engine=engine) as embedder:
        np.testing.assert_array_equal(vectors[0], embedder.embed(TOKENS))
    assert np.abs(vectors[1] - vectors[0]).max() > 1e-3 < np.abs(vectors[2] - vectors[1]).max()


def test_poolings(load) -> None:
    embedder = load()
    rows = embedder.embed(TOKENS, pooling="none", normalize=False)
    assert rows.shape == (len(TOKENS), embedder.n_embd)
    for pooling, expected in (("mean", rows.mean(axis=0)), ("cls", rows[0]), ("last", rows[-1])):
        np.testing.assert_allclose(embedder.embed(TOKENS, pooling=pooling, normalize=False), expected, atol=1e-6)


@pytest.mark.parametrize("pooling", [pooling for pooling in Pooling if pooling is not Pooling.RANK])
def test_normalized_vectors_have_length_1(load, pooling: Pooling) -> None:
    embedder = load(mode="auto")
    vectors, raw = (embedder.embed(TOKENS, pooling=pooling, normalize=flag) for flag in (True, False))
    lengths = np.linalg.norm(raw, axis=-1, keepdims=True)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(vectors * lengths, raw, rtol=1e-4, atol=1e-6)


def test_zero_vector_stays_zero(load) -> None:
    embedder = load(tensors={"output_norm.weight": np.zeros(64)})
    assert not embedder.embed([1, 2]).any()


@pytest.mark.parametrize(("number", "pooling"), [(None, "mean"), (0, "none"), (1, "mean"), (2, "cls"), (3, "last")])
def test_pooling_type_of_the_file(load, number: int | None, pooling: str, caplog) -> None:
    embedder = load(metadata={"llama.pooling_type": number})
    assert embedder.pooling == pooling
    np.testing.assert_array_equal(embedder.embed([1, 5, 9]), embedder.embed([1, 5, 9], pooling=pooling))
    assert "pooling_type" not in caplog.text


@pytest.mark.parametrize(("n_embd", "n_head"), [(72, 4), (40, 2), (256, 4)])
def test_output_widths(tiny_gguf, plugins, n_embd: int, n_head: int) -> None:
    path = tiny_gguf("gqa", n_embd=n_embd, n_head=n_head, n_head_kv=2)
    found = [
        load_embedder(path, "fp32", plugins=plugins, engine=engine()).embed([3, 1, 4])
        for engine in (ReferenceEngine, default_engine)
    ]
    assert formulas.nmse(*found) < 1e-8


def test_texts_are_independent(load) -> None:
    embedder = load()
    first = embedder.embed([1, 5, 9])
    embedder.embed([7, 7])
    np.testing.assert_array_equal(embedder.embed([1, 5, 9]), first)


def test_errors(load) -> None:
    embedder = load(context_length=8)
    for tokens, message in (
        ([], "no tokens"),
        ([1] * 9, "9 more do not fit into 8"),
        ([128], "not an id from 0 to 127"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            embedder.embed(tokens)
    with pytest.raises(InvalidRequestError, match="pooling 'max' is not one of none, mean, cls, last, rank"):
        embedder.embed([1], pooling="max")
    with pytest.raises(ModelFormatError, match=r"llama.pooling_type = 5 is not one of 0 to 4"):
        load(metadata={"llama.pooling_type": 5})
    with pytest.raises(ModelFormatError, match=r"llama.pooling_type = 4, and it has no tensor cls or cls.output"):
        load(metadata={"llama.pooling_type": 4})


class TestClassifiers:
    """Heads of rerankers."""

    @pytest.mark.parametrize("variant", slow_but(first_variants(tiny_variants.CLASSIFIERS), tiny_variants.CLASSIFIERS))
    def test_scores_match_llama_cpp(self, load, variant: str) -> None:
        expected = np.load(embeddings.CLASSIFIERS_GOLDEN)[f"{variant}-rank"]
        embedder = load(variant)
        assert embedder.pooling == "rank"
        assert formulas.nmse(np.array(embedder.classify(TOKENS)), expected) < tiny_variants.CLASSIFIERS[variant].exact
        np.testing.assert_allclose(load(variant, "q8").classify(TOKENS), expected, atol=0.03)

    def test_labels_name_the_scores(self, load) -> None:
        embedder = load("bert_classes")
        assert embedder.labels == ["first", "second", "third"]
        assert len(embedder.classify(TOKENS)) == 3
        assert load("bert_rank").labels == []

    def test_a_rank_is_the_score_of_the_pair(self, load) -> None:
        embedder = load("qwen3_rank", tokenizer="spm")
        scores = embedder.rank("a", ["b", "c c"])
        text = "<|im_start|>user\n<Query>: a\n<Document>: b<|im_end|>\n"
        assert scores[0] == embedder.classify(embedder.tokenizer.encode(text, add_special=False, parse_special=True))[0]
        assert scores[0] != scores[1]
        assert embedder.rank("a", []) == []

    def test_models_without_a_head_rank_nothing(self, load) -> None:
        with pytest.raises(InvalidRequestError, match="text 1: the model has no classifier head"):
            load(tokenizer="spm").rank("a", ["b"])
        with pytest.raises(InvalidRequestError, match="list of texts"):
            load("bert_rank").rank("a", "b")

    def test_texts_that_are_too_long_are_named(self, load) -> None:
        with pytest.raises(InvalidRequestError, match=r"text 2: the text has .* at most 64 at once"):
            load("bert_rank", tokenizer="spm").rank("a", ["b", "c " * 100])

    def test_other_poolings_of_a_reranker(self, load) -> None:
        embedder = load("bert_rank")
        assert embedder.embed(TOKENS, pooling="cls").shape == (64,)
        np.testing.assert_array_equal(embedder.embed(TOKENS), np.float32(embedder.classify(TOKENS)))

    def test_a_dense_layer_alone_has_a_row_a_class(self, load) -> None:
        with pytest.raises(ModelFormatError, match=r"cls.weight has 64 rows for 1 classes, and there is no cls.output"):
            load("bert", tensors={"cls.weight": np.zeros((64, 64))})


def test_output_layer_is_not_loaded(tiny_gguf, plugins) -> None:
    seen: list[Graph] = []

    class Watching:
        def compile(self, graph, file, mode):
            seen.append(graph)
            raise PluginError("seen enough")

    with pytest.raises(PluginError, match="seen enough"):
        load_embedder(tiny_gguf(), plugins=plugins, engine=Watching())
    (graph,) = seen
    assert isinstance(graph.ops[-1], RmsNorm)
    assert "output.weight" not in {tensor.name for op in graph.ops for tensor in op.tensors()}


def test_ops_after_the_output_layer_are_removed() -> None:
    g = Graph()
    x = g.rms_norm(g.embed(Param(Tensor("token_embd.weight", (16, 8)))), None, 1e-5)
    g.softcap(g.scale(g.linear(x, Param(Tensor("output.weight", (16, 8)))), 0.5), 30.0)
    assert [type(op) for op in g.ops[-1:]] == [Softcap]
    part = g.without_output()
    assert part.ops[-1].out is x
    assert not [op for op in part.ops if isinstance(op, Linear)]
    assert part.states is g.states


def test_close(load) -> None:
    with load() as embedder:
        embedder.embed([1])
    with pytest.raises(ClosedError):
        embedder.embed([1])


@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_error_for_nan(load) -> None:
    with pytest.raises(InvalidRequestError, match="the model's hidden states are not finite numbers"):
        load(metadata={"llama.rope.scaling.attn_factor": 3e38}).embed(TOKENS)


class TestText:
    def test_text_is_tokenized(self, load) -> None:
        embedder = load(tokenizer="spm")
        np.testing.assert_array_equal(embedder.embed("a b"), embedder.embed(embedder.tokenizer.encode("a b")))

    def test_several_texts_are_rows(self, load) -> None:
        embedder = load(tokenizer="spm")
        rows = embedder.embed(["a b", "b", "a b"], normalize=False)
        assert rows.shape == (3, embedder.n_embd)
        for row, text in zip(rows, ["a b", "b", "a b"], strict=True):
            np.testing.assert_array_equal(row, embedder.embed(text, normalize=False))

    def test_what_is_refused(self, load) -> None:
        embedder = load(tokenizer="spm")
        with pytest.raises(InvalidRequestError, match="several texts need a pooling"):
            embedder.embed(["a"], pooling="none")
        with pytest.raises(InvalidRequestError, match="cannot be mixed"):
            embedder.embed(["a", 3])


def test_embedder_and_tokenizer_say_what_they_are() -> None:
    with load_embedder(demo_path()) as embedder:
        about = "pooling mean, vectors of 192, texts of at most 1024 tokens"
        assert repr(embedder) == f"<Embedder of 'llamacli demo stories': {about}>"
        assert repr(embedder.tokenizer) == "<Tokenizer, 2048 tokens, 4 of them special>"
