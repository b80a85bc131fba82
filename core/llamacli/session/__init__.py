"""Sessions: evaluation and sampling of token streams with KV caches.

- `evaluation`: planned tokens of several streams in the same batches.
- `stream`: one stream of evaluated tokens, its cache and logits, and how it goes back.
- `session`: a stream with a sampler, generation and saved states.
"""

from llamacli.session.session import Session
from llamacli.session.stream import TokenStream, eval_batch

__all__ = ["Session", "TokenStream", "eval_batch"]
