"""Text embeddings: hidden states of the final norm, pooled."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.engine import Chunk, QuantMode, evaluate
from llamacli.errors import ContextOverflowError, InvalidRequestError, ModelFormatError
from llamacli.graph import Graph
from llamacli.kv import N_BATCH, KVSequence
from llamacli.model import Model, load_model
from llamacli.util.numbers import is_integer


class Pooling(enum.StrEnum):
    """Pooling of token vectors: mean, first token (`cls`), last token, or none."""

    NONE = "none"
    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


_BY_NUMBER = (Pooling.NONE, Pooling.MEAN, Pooling.CLS, Pooling.LAST)
"""Values of the metadata key `{arch}.pooling_type`, by number."""


def pooling_of(model: Model) -> Pooling:
    """Pooling that a file names, else the mean; ModelFormatError for ranking models."""
    key = f"{model.arch}.pooling_type"
    number = model.metadata.get_int(key, 1, minimum=0)
    if number >= len(_BY_NUMBER):
        raise ModelFormatError(f"{model.metadata.source}: {key} = {number}: ranking models are not supported")
    return _BY_NUMBER[number]


def pool_states(
    states: npt.NDArray[np.float32], pooling: Pooling, *, normalize: bool = True
) -> npt.NDArray[np.float32]:
    """Pool the hidden states of a text's tokens, float32 [n_tokens, n_embd].

    The last one's are enough for the last token's vector. Returns float32 [n_embd], without pooling [n_tokens, n_embd];
    `normalize` scales vectors to length 1. Raises InvalidRequestError for states that are not finite.
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

    `pooling` is that of the file, else the mean; `tokenizer` is the model's; `n_embd` is the width of vectors.
    `max_tokens` is the length of the longest text.
    """

    def __init__(self, model: Model, n_embd: int):
        self._model, self.pooling, self.tokenizer = model, pooling_of(model), model.tokenizer
        self.n_embd = n_embd
        n = model.context_size(min(model.config.n_ctx, model.program.max_positions or model.config.n_ctx))
        self.max_tokens = min(n, N_BATCH) if model.program.needs_whole_input else n

    def embed(
        self, text: str | Sequence[int] | Sequence[str], *, pooling: Pooling | str | None = None, normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """Embed text or token ids as one vector, float32 [n_embd].

        Without pooling ("none") as [n_tokens, n_embd]. Several texts, given as a list of strings, are float32 [n_texts,
        n_embd], and need a pooling. `pooling` overrides the file's. `normalize` scales vectors to length 1. Raises
        InvalidRequestError for an empty text, more than `max_tokens` tokens, ids outside of the vocabulary, an unknown
        pooling, or states that are not finite; TokenizerError if the vocabulary cannot express a text.
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
        return np.stack([self._embed(self.tokenizer.encode(one), pooling, normalize) for one in texts])

    def _embed(self, tokens: Sequence[int], pooling: Pooling, normalize: bool) -> npt.NDArray[np.float32]:
        if not len(tokens):
            raise InvalidRequestError("the text has no tokens")
        states = self._states(tokens, only_last=pooling is Pooling.LAST)
        return pool_states(states, pooling, normalize=normalize)

    def _states(self, tokens: Sequence[int], *, only_last: bool) -> npt.NDArray[np.float32]:
        """Hidden states of all tokens or the last, float32 [n, n_embd]."""
        if self._model.program.needs_whole_input:
            return self._evaluate_at_once(tokens, only_last=only_last)
        try:
            with self._model.create_session(n_ctx=self.max_tokens, reuse=False) as session:
                rows = session.eval(tokens, all_logits=not only_last)
                return session.logits[None] if rows is None else rows
        except ContextOverflowError as error:
            raise InvalidRequestError(str(error)) from error

    def _evaluate_at_once(self, tokens: Sequence[int], *, only_last: bool) -> npt.NDArray[np.float32]:
        """Evaluate a text in one batch, its tokens attending in both directions."""
        n_vocab = self._model.config.n_vocab
        for i, token in enumerate(tokens):
            if not is_integer(token) or not 0 <= token < n_vocab:
                raise InvalidRequestError(f"token {token!r} at index {i} is not an id from 0 to {n_vocab - 1}")
        if len(tokens) > self.max_tokens:
            raise InvalidRequestError(
                f"the text has {len(tokens)} tokens; this model attends in both directions and takes at most "
                f"{self.max_tokens} at once"
            )
        ids = list(map(int, tokens))
        sequence = KVSequence(self._model.kv_pool("f32"), len(ids))  # keys and values of one text: no need to round
        try:
            chunk = Chunk(sequence, ids, self._model.adapters, 1 if only_last else len(ids))
            return evaluate(self._model.program_with, [chunk])[0]
        finally:
            sequence.close()

    def close(self) -> None:
        """Free the weights; closing twice does nothing."""
        self._model.close()

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
