"""KV cache: paged memory, sequences, prefix cache, leases, snapshots.

- `layout`, `pool`, `sequence`: pages of cells, their memory, and one sequence of tokens.
- `recurrent`: the states of recurrent layers, which each token replaces.
- `prefixes`: finds cached sequences that share a token prefix. `prompt_cache`: keeps them on disk.
- `cache`, `sequence_pool`: numbered sequences, and leases of them.
- `snapshot`: serialization.
- `strategies`, `entries`: whether to cache at all; caches used entry by entry, without a model.
"""

from llamacli.util.exports import exports

_MODULE_OF, __getattr__, __dir__ = exports(__name__, __file__)

__all__ = list(_MODULE_OF)
