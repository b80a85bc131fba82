"""Text embeddings and scores of rerankers: pooled hidden states."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine import Chunk, QuantMode, evaluate
from llamacli.engine.classifier import Classifier, Dense
from llamacli.errors import ContextOverflowError, InvalidRequestError, ModelFormatError
from llamacli.graph import Graph
from llamacli.kv import N_BATCH, KVSequence
from llamacli.model import Model, load_model
from llamacli.tools.pairs import encode_pair, rerank_template
from llamacli.util.numbers import is_integer


class Pooling(enum.StrEnum):
    """Pooling of token vectors: mean, first token (`cls`), last token, or none.

    `rank` gives the scores of a classifier head instead.
    """

    NONE = "none"
    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    RANK = "rank"


_BY_NUMBER = (Pooling.NONE, Pooling.MEAN, Pooling.CLS, Pooling.LAST, Pooling.RANK)
"""Values of the metadata key `{arch}.pooling_type`, by number."""


def pooling_of(model: Model) -> Pooling:
    """Pooling that a file names, else the mean.

    Raises ModelFormatError for an unknown one, and for rank without a classifier head.
    """
    key = f"{model.arch}.pooling_type"
    number = model.metadata.get_int(key, 1, minimum=0)
    if number >= len(_BY_NUMBER):
        raise ModelFormatError(f"{model.metadata.source}: {key} = {number} is not one of 0 to {len(_BY_NUMBER) - 1}")
    pooling = _BY_NUMBER[number]
    if pooling is Pooling.RANK and model.classifier is None:
        raise ModelFormatError(f"{model.metadata.source}: {key} = {number}, and it has no tensor cls or cls.output")
    return pooling


@attrs.frozen
class Pooler:
    """Pooling of a model's hidden states.

    `default` is that of the file, else the mean.
    `state` is the pooling before the `classifier` head, which is None in models without one. `dense` are layers for
    the states that other poolings take.
    """

    default: Pooling
    state: Pooling = Pooling.CLS
    classifier: Classifier | None = None
    dense: Dense | None = None

    @classmethod
    def of(cls, model: Model) -> Pooler:
        """Pooler of a model; ModelFormatError for a file whose pooling is unknown."""
        first_or_last = Pooling.CLS if model.program.needs_whole_input else Pooling.LAST
        is_mean = model.config.classifier_pooling == _BY_NUMBER.index(Pooling.MEAN)
        return cls(pooling_of(model), Pooling.MEAN if is_mean else first_or_last, model.classifier, model.dense)

    def needs_last_only(self, pooling: Pooling) -> bool:
        """True if the last token's hidden state is enough."""
        return (self.state if pooling is Pooling.RANK else pooling) is Pooling.LAST

    def pool(
        self, states: npt.NDArray[np.float32], pooling: Pooling | None = None, *, normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """Pool states as `pool_states`, or score the classes.

        Those of the pooling rank are float32 [n_classes].
        Raises InvalidRequestError as it does, and for a rank without a classifier head.
        """
        if (pooling or self.default) is not Pooling.RANK:
            states = self.dense.apply(states) if self.dense else states
            return pool_states(states, pooling or self.default, normalize=normalize)
        if self.classifier is None:
            raise InvalidRequestError("the model has no classifier head, so it cannot rank texts")
        return self.classifier.scores(pool_states(states, self.state, normalize=False))


def pool_states(
    states: npt.NDArray[np.float32], pooling: Pooling, *, normalize: bool = True
) -> npt.NDArray[np.float32]:
    """Pool the hidden states of a text's tokens, float32 [n_tokens, n_embd].

    `pooling` is any but rank. The last one's are enough for the last token's vector. Returns float32 [n_embd], without
    pooling [n_tokens, n_embd]; `normalize` scales vectors to length 1. Raises InvalidRequestError for states that are
    not finite.
    """
    if not np.isfinite(states).all():
        raise InvalidRequestError("the model's hidden states are not finite numbers")
    rows = states
    if pooling is Pooling.MEAN:
        rows = states.mean(axis=0, dtype=np.float64, keepdims=True)
    elif pooling is Pooling.CLS:
        rows = states[:1]
    elif pooling is Pooling.LAST:
        rows = states[-1:]
    if normalize:
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    vectors: npt.NDArray[np.float32] = np.asarray(rows, np.float32)
    return vectors if pooling is Pooling.NONE else vectors[0]


class Embedder(contextlib.AbstractContextManager["Embedder"]):
    """A model loaded for embeddings by `load_embedder`.

    `model` is the loaded model, `pooling` that of the file, else the mean; `tokenizer` is the model's; `n_embd` is the
    width of vectors. `max_tokens` is the length of the longest text. `labels` are the names of a classifier head's
    classes.
    """

    def __init__(self, model: Model, n_embd: int):
        self.model, self._pooler, self.tokenizer = model, Pooler.of(model), model.tokenizer
        self.pooling, self.labels = self._pooler.default, model.config.labels
        self.n_embd = model.dense.width if model.dense else n_embd
        n = model.context_size(min(model.config.n_ctx, model.program.max_positions or model.config.n_ctx))
        self.max_tokens = min(n, N_BATCH) if model.program.needs_whole_input else n

    def __repr__(self) -> str:
        about = f"pooling {self.pooling}, vectors of {self.n_embd}, texts of at most {self.max_tokens} tokens"
        return f"<Embedder of {self.model.name!r}: {about}>"

    def embed(
        self, text: str | Sequence[int] | Sequence[str], *, pooling: Pooling | str | None = None, normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """Embed text or token ids as one vector, float32 [n_embd].

        Without pooling ("none") as [n_tokens, n_embd], of the pooling "rank" scores as `classify` gives them. Several
        texts, given as a list of strings, are float32 [n_texts, n_embd], and need a pooling. `pooling` overrides the
        file's. `normalize` scales vectors to length 1. Raises InvalidRequestError for an empty text, more than
        `max_tokens` tokens, ids outside of the vocabulary, an unknown pooling, or states that are not finite;
        TokenizerError if the vocabulary cannot express a text.
        """
        try:
            pooling = Pooling(pooling or self.pooling)
        except ValueError:
            raise InvalidRequestError(f"pooling {pooling!r} is not one of {', '.join(Pooling)}") from None
        if isinstance(text, str):
            return self._embed(self.tokenizer.encode(text), pooling, normalize)
        texts = [one for one in text if isinstance(one, str)]
        if not texts:
            return self._embed([token for token in text if not isinstance(token, str)], pooling, normalize)
        if len(texts) < len(text):
            raise InvalidRequestError("texts and token ids cannot be mixed in one list")
        if pooling is Pooling.NONE:
            raise InvalidRequestError("several texts need a pooling: their sizes differ without")
        return np.stack(list(self.vectors(map(self.tokenizer.encode, texts), pooling=pooling, normalize=normalize)))

    def vectors(
        self, texts: Iterable[Sequence[int]], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Embed texts of token ids one after another, as `embed` does each.

        Encoders evaluate several short texts at once, with the same bits. An invalid text raises when it is its turn.
        """
        pooling = pooling or self.pooling
        for states in self._states_of(texts, only_last=self._pooler.needs_last_only(pooling)):
            yield self._pooler.pool(states, pooling, normalize=normalize)

    def rank(self, query: str, texts: Sequence[str]) -> list[float]:
        """Score texts by their relevance to a query, a number each.

        The score of llama.cpp's pooling of type rank: the first class of the classifier head, for a query and a text
        in the form of the file's template `rerank`, or with the vocabulary's separators between. Raises
        InvalidRequestError for a model without such a head, and for a pair of more than `max_tokens` tokens.
        """
        if isinstance(texts, str):
            raise InvalidRequestError("texts is a list of texts: put a single text into a list")
        template, scores = rerank_template(self.model.metadata), []
        for i, text in enumerate(texts):
            try:
                ids = encode_pair(self.tokenizer, template, query, text)
                scores.append(float(self._embed(ids, Pooling.RANK, False)[0]))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"text {i + 1}: {error}") from error
        return scores

    def classify(self, text: str | Sequence[int]) -> list[float]:
        """Score the classes of a text, a number for each label.

        Without `labels` there is one.
        Raises InvalidRequestError for a model without a classifier head, and as `embed`.
        """
        ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        return [float(score) for score in self._embed(ids, Pooling.RANK, False)]

    def _embed(self, tokens: Sequence[int], pooling: Pooling, normalize: bool) -> npt.NDArray[np.float32]:
        return next(self.vectors([tokens], pooling=pooling, normalize=normalize))

    def _states_of(self, texts: Iterable[Sequence[int]], *, only_last: bool) -> Iterator[npt.NDArray[np.float32]]:
        """Hidden states of each text's tokens or last one, [n, n_embd]."""
        waiting: list[list[int]] = []
        for tokens in texts:
            try:
                ids = self._checked(tokens)
                if not self.model.program.needs_whole_input:
                    yield self._evaluated_by_session(ids, only_last=only_last)
                    continue
            except InvalidRequestError:
                yield from self._evaluated_at_once(waiting, only_last=only_last)
                raise
            if sum(map(len, waiting)) + len(ids) > N_BATCH:
                yield from self._evaluated_at_once(waiting, only_last=only_last)
                waiting = []
            waiting.append(ids)
        yield from self._evaluated_at_once(waiting, only_last=only_last)

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        if not len(tokens):
            raise InvalidRequestError("the text has no tokens")
        n_vocab = self.model.config.n_vocab
        for i, token in enumerate(tokens):
            if not is_integer(token) or not 0 <= token < n_vocab:
                raise InvalidRequestError(f"token {token!r} at index {i} is not an id from 0 to {n_vocab - 1}")
        if self.model.program.needs_whole_input and len(tokens) > self.max_tokens:
            raise InvalidRequestError(
                f"the text has {len(tokens)} tokens; this model attends in both directions and takes at most "
                f"{self.max_tokens} at once"
            )
        return list(map(int, tokens))

    def _evaluated_by_session(self, ids: list[int], *, only_last: bool) -> npt.NDArray[np.float32]:
        try:
            with self.model.create_session(n_ctx=self.max_tokens, reuse=False) as session:
                rows = session.eval(ids, all_logits=not only_last)
                return session.logits[None] if rows is None else rows
        except ContextOverflowError as error:
            raise InvalidRequestError(str(error)) from error

    def _evaluated_at_once(self, texts: list[list[int]], *, only_last: bool) -> list[npt.NDArray[np.float32]]:
        if not texts:
            return []
        pool = self.model.kv_pool("f32")  # keys and values of one text: no need to round
        with contextlib.ExitStack() as stack:
            chunks = []
            for ids in texts:
                sequence = KVSequence(pool, len(ids))
                stack.callback(sequence.close)
                chunks.append(Chunk(sequence, ids, self.model.adapters, 1 if only_last else len(ids)))
            return evaluate(self.model.program_with, chunks)

    def close(self) -> None:
        """Free the weights; closing twice does nothing."""
        self.model.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def load_embedder(path: str | os.PathLike[str], mode: str | QuantMode = QuantMode.AUTO, **options: Any) -> Embedder:
    """Load a model file for embeddings.

    Arguments and errors are those of `load_model`. The output layer is neither loaded nor computed.
    """
    widths: list[int] = []

    def transform(graph: Graph) -> Graph:
        part = graph.without_output()
        widths.append(part.ops[-1].out.width)
        return part

    return Embedder(load_model(path, mode, **options, transform=transform), widths[0])
