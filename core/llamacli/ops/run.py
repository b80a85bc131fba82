"""Arguments of ops that run in NumPy.

The rows of one sequence, and the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.inputs import Inputs
from llamacli.kv import KVSequence
from llamacli.kv.layout import KVSpec
from llamacli.ops.values import Array, LowRank, Tensor, Value


@attrs.frozen(eq=False)
class Span:
    """Consecutive tokens of a sequence within a batch.

    `n` tokens, from cell `start` of `sequence` on. `hidden`, float32 [n, n_embd], are the hidden states that
    `g.previous_hidden` reads; None for zeros. `inputs`, n tokens with positions that are known (`Inputs.placed`), have
    embeddings, positions and spans; None for ids whose positions are the numbers of their cells. `adapter_scales`,
    float64 [n_adapters], are the scales of the program's LoRA adapters; None for 1. The first `n_encoded` cells of the
    sequence are of the encoder's text, in which the span lies wholly or not at all. `is_prompt`: the tokens go the way
    of prompts, where the program has one; so do all of a batch.
    """

    sequence: KVSequence
    start: int
    n: int
    hidden: npt.NDArray[np.float32] | None = None
    inputs: Inputs | None = None
    adapter_scales: npt.NDArray[np.float64] | None = None
    n_encoded: int = 0
    is_prompt: bool = False

    @property
    def encodes(self) -> bool:
        """True for tokens of the encoder's text."""
        return self.start < self.n_encoded

    @property
    def n_behind(self) -> int:
        """Cells before position 0: the encoder's, for a decoder's tokens."""
        return 0 if self.encodes else self.n_encoded

    @property
    def firsts(self) -> npt.NDArray[np.int64]:
        """First cell of each token's bidirectional span, or its own, [n]."""
        out = np.arange(self.start, self.start + self.n)
        for start, stop in self.inputs.spans if self.inputs is not None else ():
            out[start:stop] = self.start + start
        return out

    def part(self, first: int, stop: int) -> Span:
        """Tokens `first` to `stop` - 1 of the span."""
        hidden = None if self.hidden is None else self.hidden[first:stop]
        inputs = None if self.inputs is None else self.inputs.part(first, stop)
        return attrs.evolve(self, start=self.start + first, n=stop - first, hidden=hidden, inputs=inputs)


@attrs.frozen(eq=False)
class Run:
    """Arguments of `Op.compute`: n consecutive tokens of one sequence.

    - `run[value]`: float64 [n, width]; `run[tensor]`: float64 in the tensor's shape.
    - `tokens`: int32 [n]; `start`: the cell of the first.
    - `sequence`: the cached keys and values; `states[i]`: the shape of the keys and values of layer i.
    - `hidden`: float32 [n, n_embd], hidden states of the tokens before; None for zeros.
    - `span.inputs`: embeddings, positions and spans; None for plain ids.
    - `is_tiled`: matrix products and attention are those of tiles.
    """

    tokens: npt.NDArray[np.int32]
    span: Span
    states: Sequence[KVSpec]
    values: Mapping[Value, npt.NDArray[np.float32]]
    weights: Callable[[Tensor], Array]
    is_tiled: bool = False

    def __getitem__(self, what: Value | Tensor) -> Array:
        return self.weights(what) if isinstance(what, Tensor) else self.values[what].astype(np.float64)

    @property
    def n(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def start(self) -> int:
        """Cell of the first token."""
        return self.span.start

    @property
    def sequence(self) -> KVSequence:
        """Sequence of the tokens, with the cells before them."""
        return self.span.sequence

    def scale_of(self, change: LowRank) -> float:
        """Factor of a low-rank change."""
        scales = self.span.adapter_scales
        return change.ratio * (1.0 if scales is None else float(scales[change.adapter]))

    @property
    def hidden(self) -> npt.NDArray[np.float32] | None:
        """Hidden states of the tokens before, float32 [n, n_embd]; None for zeros."""
        return self.span.hidden

    @property
    def positions(self) -> npt.NDArray[np.intp]:
        """Positions of the tokens, [n]; of several components the first, time."""
        return self.components[:, 0]

    @property
    def components(self) -> npt.NDArray[np.intp]:
        """Positions of the tokens, [n, 1], or [n, 4] for M-RoPE."""
        inputs = self.span.inputs
        if inputs is not None and inputs.positions is not None:
            return inputs.positions.astype(np.intp)
        return np.arange(self.start, self.start + self.n)[:, None] - self.span.n_behind

    def seen(self, i: int, n_before: int, n_after: int, chunk: int | None = None) -> slice:
        """Cells that token i attends to.

        Those of up to `n_before` tokens before it, and from the last multiple of `chunk` on; behind it `n_after`, or
        the rest of its bidirectional span.
        """
        own = self.start + i
        first = max(self.span.n_behind, own - n_before, own // chunk * chunk if chunk else 0)
        return slice(first, min(self.start + self.n, own + 1 + max(n_after, int(self.n_ahead[i]))))

    @property
    def n_ahead(self) -> npt.NDArray[np.intp]:
        """Tokens behind each token in its bidirectional span, [n]."""
        out = np.zeros(self.n, np.intp)
        for start, stop in self.span.inputs.spans if self.span.inputs is not None else ():
            out[start:stop] = np.arange(stop - start)[::-1]
        return out
