"""Pairs of a query and a text, as rerankers read them."""

from __future__ import annotations

import re

from llamacli.chat.formats import own_templates
from llamacli.gguf import Metadata
from llamacli.tokenizer import Tokenizer

_PLACES = re.compile(r"(\{query\}|\{document\})")


def rerank_template(metadata: Metadata) -> str | None:
    """Template `rerank` of a file, with `{query}` and `{document}`; None without one."""
    return own_templates(metadata).get("rerank")


def encode_pair(tokenizer: Tokenizer, template: str | None, query: str, text: str) -> list[int]:
    """Token ids of a query and a text.

    They are joined by a template, or with the vocabulary's separators.
    As llama-server, but special tokens that the query and the text spell stay text. TokenizerError when the vocabulary
    cannot express them.
    """
    if template is None:
        return _separated(tokenizer, query, text)
    given, parts = {"{query}": query, "{document}": text}, list[int | str]()
    for piece in _PLACES.split(template):
        for part in [given[piece]] if piece in given else tokenizer.split(piece, tokenizer.special_ids):
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
    return [token for part in parts for token in ([part] if isinstance(part, int) else tokenizer.encode_run(part))]


def _separated(tokenizer: Tokenizer, query: str, text: str) -> list[int]:
    end = tokenizer.sep_id if tokenizer.eos_id is None else tokenizer.eos_id
    begins = [tokenizer.bos_id] if tokenizer.add_bos else []
    ends = [end] if tokenizer.add_eos else []
    between = [*ends, *([tokenizer.sep_id] if tokenizer.add_sep else [])]
    first, second = (tokenizer.encode(one, add_special=False) for one in (query, text))
    return [token for token in [*begins, *first, *between, *second, *ends] if token is not None]
