"""Run a GGUF file through llama.cpp: `python -m oracle.peer MODEL OUT.npz --tokens 1 5 9 --greedy 20`.

OUT.npz gets the result of `run`. The keys and values are kept in float32 and flash attention is off, so that a float32
file gives llama.cpp's most exact numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).resolve().parents[2] / "core"))  # llama.cpp may be in another interpreter
from llamacli.testing.peer import Peer

__all__ = ["Peer", "run"]


def run(
    path: Path, tokens: Sequence[int], n_prompt: int, n_greedy: int, n_ctx: int, encoded: Sequence[int] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Run a file on `tokens`, then decode greedily after `n_prompt` of them.

    Some models compute otherwise in a long context than in a short one, whatever the number of tokens. Returns `logits`
    float32 [len(tokens), n_vocab], `greedy` int32 [n_greedy], and `gaps` float32 [n_greedy], by how much the logit of
    each was larger than the next best. Without tokens the prompt is BOS. A model with an encoder begins with `encoded`.
    """
    with Peer(path, n_ctx) as peer:
        peer.begin(encoded)
        tokens = tokens if len(tokens) else [peer.bos]
        logits = peer.eval(tokens)
    with Peer(path, n_ctx) as peer:
        peer.begin(encoded)
        greedy, gaps = peer.greedy(tokens[: n_prompt or len(tokens)], n_greedy)
    return {"logits": logits, "greedy": np.array(greedy, np.int32), "gaps": np.array(gaps, np.float32)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=[], help="token ids; none is BOS")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of these that greedy decoding follows; 0 is all")
    parser.add_argument("--greedy", type=int, default=0, help="tokens to decode greedily")
    parser.add_argument("--context", type=int, default=256, help="length of the context; default: 256")
    options = parser.parse_args()
    np.savez(options.out, **run(options.model, options.tokens, options.prompt, options.greedy, options.context))
