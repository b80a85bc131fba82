"""Byte-level vocabulary of tokens that begin, complete or interrupt a character."""

from typing import Any

from hypothesis import strategies as st

from llamacli.testing import vocabularies
from tiny_chat import CONTROL, SPECIAL

_UNUSED = 5
MERGES = ["a \u00c3", "\u0120 \u00e2", "\u00a9 b", "\u0124 \u00ac"]
"""Pieces "a" and the first byte of "é", a space and that of "€", their last bytes, the first with "b"."""

_KINDS = {"<s>": CONTROL, "</s>": CONTROL, "<unused>": _UNUSED, **SPECIAL}
_KEYS = vocabularies.byte_level(MERGES, _KINDS)


def byte_keys(n_vocab: int | None = None, **more: Any) -> dict[str, Any]:
    """Metadata of the vocabulary, with unused tokens up to `n_vocab`."""
    tokens, types = list(_KEYS["tokenizer.ggml.tokens"]), _KEYS["tokenizer.ggml.token_type"].tolist()
    n_more = (n_vocab or len(tokens)) - len(tokens)
    return {
        **_KEYS,
        "tokenizer.ggml.tokens": tokens + [f"<unused {i}>" for i in range(n_more)],
        "tokenizer.ggml.token_type": types + [_UNUSED] * n_more,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        **more,
    }


TEXTS: list[str] = _KEYS["tokenizer.ggml.tokens"]
N_VOCAB = len(TEXTS)
EOS = TEXTS.index("</s>")
WHOLE = [TEXTS.index(text) for text in "abc"]
PARTS = [*"é€".encode(), *map(TEXTS.index, ("a\u00c3", "\u0120\u00e2", "\u00a9b", "\u0124\u00ac"))]
SILENT = [TEXTS.index("<s>"), TEXTS.index("<unused>")]

TOKENS = st.sampled_from(WHOLE) | st.sampled_from([*PARTS, *SILENT]) | st.integers(0, N_VOCAB - 1)
"""Tokens of characters whole and in parts, tokens without text, and any token."""
