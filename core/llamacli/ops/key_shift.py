"""K-shift: move cached keys to other positions.

Removing tokens in the middle of a context needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.ops.values import Tensor, Value

Keys = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class KeyShift:
    """Argument of `Op.shift_keys`: a shift of cached keys.

    By `by` positions, in a context of `seq_len` tokens.

    - `weight(tensor)`: a tensor in float32.
    - `of(value, keys, is_normed)`: rows of `value`, an input of the op, as they would be at positions `by` lower; None
      if that cannot be computed.
    - `is_normed`: the caller divides by the length of each head, so only what keeps lengths, or multiplies all of them
      by one factor, can be undone.
    """

    by: int
    seq_len: int
    weight: Callable[[Tensor], npt.NDArray[Any]]
    of: Callable[[Value, Keys, bool], Keys | None]
    is_normed: bool = False
