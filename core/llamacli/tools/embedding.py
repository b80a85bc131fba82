"""Texts as vectors: what a model's last block makes of their tokens, pooled."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.engine import QuantMode
from llamacli.errors import ContextOverflowError, InvalidRequestError, ModelFormatError
from llamacli.graph import Graph
from llamacli.model import Model, load_model
from llamacli.util.closing import Closing


class Pooling(enum.StrEnum):
    """Which vector stands for a text: the mean of its tokens', the first one's (`cls`), the last one's; or all."""

    NONE = "none"
    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


_BY_NUMBER = (Pooling.NONE, Pooling.MEAN, Pooling.CLS, Pooling.LAST)
"""What the numbers under `{arch}.pooling_type` mean."""


class Embedder(Closing):
    """A model loaded to embed texts; `load_embedder` returns one.

    `pooling` is what the file says, else the mean. `tokenizer` is the model's.
    """

    def __init__(self, model: Model):
        key = f"{model.arch}.pooling_type"
        number = model.metadata.get_int(key, 1, minimum=0)
        if number >= len(_BY_NUMBER):
            raise ModelFormatError(f"{model.metadata.source}: {key} = {number}: rankings are not supported")
        self._model, self.pooling, self.tokenizer = model, _BY_NUMBER[number], model.tokenizer
        self.n_embd = model.config.n_embd

    def embed(
        self, tokens: Sequence[int], *, pooling: Pooling | str | None = None, normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """The vector of a text of `tokens`, float32 [n_embd]; with pooling "none" of each token, [n_tokens, n_embd].

        `pooling` is asked for in the place of the file's. With `normalize`, vectors have the length 1.
        Raises InvalidRequestError for no tokens, more than the model's context, ids that are not in the vocabulary, or
        an unknown pooling, or if the model computes what is no finite number.
        """
        try:
            pooling = Pooling(pooling or self.pooling)
        except ValueError:
            raise InvalidRequestError(f"pooling {pooling!r} is not one of {', '.join(Pooling)}") from None
        if not len(tokens):
            raise InvalidRequestError("the text has no tokens")
        try:
            with self._model.create_session(reuse=False) as session:
                only_last = pooling is Pooling.LAST
                rows = session.eval(tokens, all_logits=not only_last)
                states = session.logits[None] if rows is None else rows
        except ContextOverflowError as error:
            raise InvalidRequestError(str(error)) from error
        if not np.isfinite(states).all():
            raise InvalidRequestError("the model's states are no finite numbers")
        if pooling is Pooling.MEAN:
            states = states.mean(axis=0, dtype=np.float64, keepdims=True)
        elif pooling is Pooling.CLS:
            states = states[:1]
        if normalize:
            states = states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        vectors: npt.NDArray[np.float32] = np.asarray(states, np.float32)
        return vectors if pooling is Pooling.NONE else vectors[0]

    def close(self) -> None:
        """Free the weights; closing twice does nothing."""
        self._model.close()


def load_embedder(path: str | os.PathLike[str], mode: str | QuantMode = QuantMode.AUTO, **options: Any) -> Embedder:
    """Load a model file to embed texts with; the arguments are those of `load_model`, and so are the errors.

    The output layer is left out: it is neither kept nor computed.
    """
    return Embedder(load_model(path, mode, **options, transform=Graph.without_output))
