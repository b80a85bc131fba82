"""KL divergence of a model from a base model, as in llama.cpp.

The base model's log-probabilities of the scored tokens of `llamacli.tools.perplexity` are saved in the file of
llama.cpp's `--kl-divergence-base`: "_logits_", n_ctx, n_vocab, n_chunks as int32, the tokens as int32, and for
each scored token the scale and the smallest log-probability as float32, and n_vocab codes as uint16, an even number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.compiled_model import KVTypes
from llamacli.errors import InvalidRequestError
from llamacli.model import Model
from llamacli.tools.importance import number_of_chunks
from llamacli.tools.perplexity import MIN_CONTEXT, Estimate, check_tokens, estimates, scored_chunks

_MAGIC = b"_logits_"
_RANGE = np.float32(16)
"""Log-probabilities further below the largest are saved as this."""
_MANY = 10
"""From more tokens than this on, llama.cpp states an error."""

PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)

Array = npt.NDArray[Any]


@attrs.frozen
class Divergence:
    """Comparison so far of `n_scored` tokens in `n_chunks`.

    Pairs are values with one standard error: `perplexity` and `base`, `log_ratio` of both, `kld`, `rms_dp` (root mean
    square of differences of the token's probability) and `same_top`, the part of tokens with the same most probable
    token. `klds` and `dps` are the values of each token, float32 [n_scored].
    """

    n_chunks: int
    n_scored: int
    perplexity: tuple[float, float]
    base: tuple[float, float]
    log_ratio: tuple[float, float]
    kld: tuple[float, float]
    rms_dp: tuple[float, float]
    same_top: tuple[float, float]
    klds: Array = attrs.field(eq=False, repr=False)
    dps: Array = attrs.field(eq=False, repr=False)

    def percentiles(self, values: Array) -> dict[float, float]:
        """PERCENTILES of `klds` or `dps`, and the extremes as 100 and 0."""
        points = (100.0, *PERCENTILES, 0.0)
        return dict(zip(points, np.percentile(values, points).tolist(), strict=True))


def save_base(
    model: Model, tokens: Sequence[int], path: Path, *, n_ctx: int = 512, max_chunks: int | None = None,
    kv_type: KVTypes | None = None,
) -> Iterator[Estimate]:  # fmt: skip
    """Save the log-probabilities of a text; yields and raises as `perplexity`."""
    if not path.parent.is_dir():
        raise InvalidRequestError(f"{path}: {path.parent} is no folder")
    check_tokens(tokens, n_ctx)
    return _saved(model, tokens, path, n_ctx, number_of_chunks(tokens, n_ctx, max_chunks), kv_type)


def _saved(
    model: Model, tokens: Sequence[int], path: Path, n_ctx: int, n_chunks: int, kv_type: KVTypes | None
) -> Iterator[Estimate]:
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            header = [n_ctx, model.config.n_vocab, n_chunks, *tokens[: n_ctx * n_chunks]]
            file.write(_MAGIC + np.array(header, "<i4").tobytes())

            def chunks() -> Iterator[tuple[Array, list[int]]]:
                for logits, ids in scored_chunks(model, tokens, n_ctx, n_chunks, kv_type):
                    file.writelines(encoded(row) for row in logits)
                    yield logits, ids

            yield from estimates(chunks())
        os.replace(part, path)
    except OSError as error:
        raise InvalidRequestError(f"{path}: cannot write the file: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def encoded(logits: Array) -> bytes:
    """Row of a base file of float32 [n_vocab] logits."""
    largest = logits.max()
    smallest = max(logits.min(), largest - _RANGE)
    log_total = np.float32(math.log(np.exp(logits - largest).sum(dtype=np.float64)))
    scale = np.float32((largest - smallest) / np.float32(65535))
    codes = np.zeros(2 * ((len(logits) + 1) // 2), "<u2")
    if scale:
        steps = np.float32(1) / scale * (np.maximum(logits, smallest) - smallest)
        codes[: len(logits)] = np.rint(steps).astype("<u2")
    return np.array([scale, smallest - largest - log_total], "<f4").tobytes() + codes.tobytes()


@attrs.frozen
class BaseFile:
    """Open base file; InvalidRequestError for one that is none or is truncated."""

    path: Path
    n_ctx: int
    n_vocab: int
    n_chunks: int
    tokens: list[int]
    rows: Array

    @classmethod
    def open(cls, path: Path) -> BaseFile:
        """Open a file; `rows` are mapped, uint16 [n_chunks, n_scored, 4 + n_codes]."""
        try:
            data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"{path}: cannot read the file: {error}") from error
        if data[:8].tobytes() != _MAGIC or len(data) < 20:
            raise InvalidRequestError(
                f"{path} has no log-probabilities of a base model: --kl-divergence-base FILE without --kl-divergence "
                "saves them"
            )
        n_ctx, n_vocab, n_chunks = (int(n) for n in data[8:20].view("<i4"))
        if n_ctx < MIN_CONTEXT or n_vocab < 1 or n_chunks < 1:
            raise InvalidRequestError(f"{path}: n_ctx, n_vocab, n_chunks = {n_ctx}, {n_vocab}, {n_chunks}")
        n_scored, width = n_ctx - 1 - n_ctx // 2, 4 + 2 * ((n_vocab + 1) // 2)
        start = 20 + 4 * n_ctx * n_chunks
        if len(data) != (size := start + 2 * n_chunks * n_scored * width):
            raise InvalidRequestError(f"{path} has {len(data)} bytes, expected {size}: was it written to its end?")
        tokens = data[20:start].view("<i4")
        if ((tokens < 0) | (tokens >= n_vocab)).any():
            raise InvalidRequestError(f"{path}: a token is not one of {n_vocab}")
        rows = data[start:].view("<u2").reshape(n_chunks, n_scored, width)
        return cls(path, n_ctx, n_vocab, n_chunks, tokens.tolist(), rows)


def divergence(
    model: Model, base: BaseFile, *, max_chunks: int | None = None, kv_type: KVTypes | None = None
) -> Iterator[Divergence]:
    """Yield the comparison after each chunk of a base file.

    The last one is the result. Raises InvalidRequestError for another vocabulary, and for logits that are not finite.
    """
    if model.config.n_vocab != base.n_vocab:
        raise InvalidRequestError(
            f"{base.path} is of a vocabulary of {base.n_vocab} tokens, and the model has {model.config.n_vocab}"
        )
    return _compared(model, base, min(base.n_chunks, max_chunks or base.n_chunks), kv_type)


def _compared(model: Model, base: BaseFile, n_chunks: int, kv_type: KVTypes | None) -> Iterator[Divergence]:
    values: list[tuple[float, ...]] = []
    chunks = scored_chunks(model, base.tokens, base.n_ctx, n_chunks, kv_type)
    for chunk, (logits, ids) in enumerate(chunks):
        values += [compared(*found) for found in zip(logits, base.rows[chunk], ids, strict=True)]
        yield summary(chunk + 1, np.array(values))


def compared(logits: Array, row: Array, token: int) -> tuple[float, ...]:
    """Surprisal, that of the base, KLD, difference of probabilities, same top token.

    `row` is one of a base file. In float32 with sums in float64, as llama.cpp computes them.
    """
    scale, smallest = row[:4].view("<f4")
    base = scale * row[4 : 4 + len(logits)].astype(np.float32) + smallest
    largest = logits.max()
    log_total = np.float32(largest + np.float32(math.log(np.exp(logits - largest).sum(dtype=np.float64))))
    likely = base > -_RANGE
    terms = np.exp(base[likely]) * (base[likely] - logits[likely] + log_total)
    surprise, of_base = log_total - logits[token], -base[token]
    dp = np.exp(-surprise) - np.exp(-of_base)
    same = logits.argmax() == base.argmax()
    return float(surprise), float(of_base), float(terms.sum(dtype=np.float64)), float(dp), float(same)


def summary(n_chunks: int, values: Array) -> Divergence:
    """Statistics of rows of `compared`, float64 [n, 5]."""
    n = len(values)
    surprise, of_base, klds, dps, same = values.T
    (mean, error), (mean_base, error_base) = _mean(surprise), _mean(of_base)
    covariance = ((surprise * of_base).mean() - mean * mean_base) / (n - 1) if n >= _MANY else 0.0
    square, square_error = _mean(dps**2)
    rms, top = math.sqrt(square), float(same.mean())
    return Divergence(
        n_chunks, n, (math.exp(mean), math.exp(mean) * error), (math.exp(mean_base), math.exp(mean_base) * error_base),
        (mean - mean_base, math.sqrt(max(0.0, error**2 + error_base**2 - 2 * covariance))), _mean(klds),
        (rms, 0.5 / rms * square_error if rms else 0.0), (top, math.sqrt(top * (1 - top) / max(1, n - 1))),
        klds.astype(np.float32), dps.astype(np.float32),
    )  # fmt: skip


def _mean(values: Array) -> tuple[float, float]:
    mean, n = float(values.mean()), len(values)
    variance = float((values**2).mean()) - mean**2
    return mean, math.sqrt(variance / (n - 1)) if variance > 0 and n > _MANY else 0.0
