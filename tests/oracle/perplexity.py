"""Record llama.cpp's perplexity on real models: `python -m oracle.perplexity FILE.gguf [FILE.gguf ...]`.

The method is that of llama.cpp's perplexity tool, through the library's functions. The text is generated here.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from llamacli.conversion import file_type, plan, write
from llamacli.gguf import open_gguf
from oracle import goldens

PATH = goldens.DIRECTORY / "perplexity.json"
"""By the file's name: its SHA-256, the length of a chunk, the number of tokens, the perplexity and its error.

Of the file as it is, whose weights llama.cpp multiplies with activations of 8 bits, and `in_f32`.
"""

N_CTX = 256

_NAMES = ("Lily", "Tom", "Mia", "Ben", "Sara", "Max")
_THINGS = ("ball", "kite", "boat", "cake", "drum", "hat", "box", "lamp")
_PLACES = ("park", "garden", "kitchen", "forest", "beach", "school")
_SENTENCES = (
    "Once upon a time, there was a child named {name}. ",
    "{name} went to the {place} with a {thing}. ",
    '"Look at my {thing}!" said {name}. ',
    "{name} was very happy and wanted to play. ",
    "{other} saw the {thing} and wanted to have it too. ",
    "They played in the {place} all day. ",
    "Then the {thing} was gone, and {name} was sad. ",
    '{other} said, "Don\'t cry, {name}. I will help you find it." ',
    "They looked and looked, and found the {thing} in the {place}. ",
    "{name} smiled and said thank you. ",
    "After that, {name} and {other} were good friends.\n\n",
)


def story_text(n_sentences: int = 240) -> str:
    """Deterministic little stories of a few patterns."""
    random = np.random.RandomState(7)
    parts = []
    for i in range(n_sentences):
        name, other = random.choice(_NAMES, 2, replace=False)
        words = {"name": name, "other": other, "thing": random.choice(_THINGS), "place": random.choice(_PLACES)}
        parts.append(_SENTENCES[i % len(_SENTENCES)].format(**words))
    return "".join(parts)


def measure(path: Path) -> dict[str, Any]:
    """llama.cpp's perplexity, in the form of the golden."""
    known = {"sha256": goldens.sha256(path), "n_ctx": N_CTX, **perplexity(path)}
    with tempfile.TemporaryDirectory() as folder, open_gguf(path) as file:
        copy = Path(folder) / path.name
        write(plan(file, file_type("F32")), copy)
        return known | {"in_f32": perplexity(copy)}


def perplexity(path: Path) -> dict[str, float | int]:
    """Perplexity and its error, of so many tokens."""
    from oracle.peer import Peer

    surprises: list[float] = []
    with Peer(path, N_CTX, default_precision=True) as peer:
        tokens = peer.encode(story_text())
        for start in range(0, len(tokens) - N_CTX + 1, N_CTX):
            ids = tokens[start : start + N_CTX]
            if peer.add_bos:
                ids[0] = peer.bos
            peer.clear()
            rows = peer.eval(ids)[N_CTX // 2 : -1].astype(np.float64)
            for row, token in zip(rows, ids[N_CTX // 2 + 1 :], strict=True):
                largest = row.max()
                surprises.append(largest + math.log(np.exp(row - largest).sum()) - row[token])
    value = math.exp(np.mean(surprises))
    error = value * math.sqrt(np.var(surprises) / (len(surprises) - 1))
    return {"n_tokens": len(tokens), "value": value, "error": error}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    for model in parser.parse_args().models:
        known[model.name] = measure(model)
        print(model.name, known[model.name])
    PATH.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
