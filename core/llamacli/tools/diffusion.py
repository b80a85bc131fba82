"""Masked diffusion: fill in masked tokens, the surest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.model import Model
from llamacli.util.numbers import is_integer


def fill_masks(
    model: Model,
    tokens: Sequence[int],
    *,
    steps: int = 64,
    block_length: int | None = None,
    temperature: float = 0.0,
    seed: int = 1234,
) -> Iterator[list[int]]:
    """Fill the masked tokens of a text (LLaDA, Nie et al. 2025).

    Yields all ids after each step. `tokens` have `model.tokenizer.mask_id` where one is to be chosen, such as behind a
    prompt. A step evaluates the whole text, draws a token for each mask (at a `temperature` of 0 the likeliest), and
    keeps those of the highest probability without temperature: as many as finish after `steps` of equal shares. With a
    `block_length`, blocks of so many masks are filled one after the other, each in its share of the steps. As in
    llama.cpp, the logits of a token are those of the one before it unless the file's `diffusion.shift_logits` is false.

    Raises InvalidRequestError at once for a model that attends to earlier tokens only or has no mask token, and for
    values out of range; at the first step what `Model.logits` raises.
    """
    mask = model.tokenizer.mask_id
    if not model.program.needs_whole_input or mask is None:
        missing = "no token for masks" if mask is None else "attention to earlier tokens only"
        raise InvalidRequestError(f"the model {model.name!r} fills in no masks: it has {missing}")
    for name, value in (("steps", steps), ("block_length", 1 if block_length is None else block_length)):
        if not is_integer(value) or value < 1:
            raise InvalidRequestError(f"{name} must be an integer of at least 1, not {value!r}")
    if not 0 <= temperature < float("inf"):
        raise InvalidRequestError(f"temperature must be a number of at least 0, not {temperature!r}")
    shift = model.metadata.get_bool("diffusion.shift_logits", default=True)
    return _fill(model, [*tokens], mask, steps, block_length, temperature, np.random.default_rng(seed), shift=shift)


def _fill(
    model: Model,
    ids: list[int],
    mask: int,
    steps: int,
    block_length: int | None,
    temperature: float,
    random: np.random.Generator,
    *,
    shift: bool,
) -> Iterator[list[int]]:
    masked = [i for i, token in enumerate(ids) if token == mask]
    size = block_length or max(1, len(masked))
    blocks = [masked[i : i + size] for i in range(0, len(masked), size)]
    n_steps = max(1, steps // max(1, len(blocks)))
    for places in blocks:
        share, rest = divmod(len(places), n_steps)
        for n in [share + 1] * rest + [share] * (n_steps - rest if share else 0):
            logits = model.logits(ids)[[max(0, i - shift) for i in places]].astype(np.float64)
            logits[:, mask] = -np.inf
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            if not np.isfinite(p).all():
                raise InvalidRequestError("the model's logits are not finite numbers")
            drawn = (logits + temperature * random.gumbel(size=logits.shape)).argmax(1)
            sure = np.argsort(-p[np.arange(len(places)), drawn], kind="stable")[:n].tolist()
            for i in sure:
                ids[places[i]] = int(drawn[i])
            places = [place for i, place in enumerate(places) if i not in sure]
            yield [*ids]
