"""Branches: trees of continuations over one KV cache.

- `branches`: the store of branches, with fork, decode, sample, merge and prune.
- `slot_map`: the handles of branches.
"""

from llamacli.branches.branches import Branches, KVPressure

__all__ = ["Branches", "KVPressure"]
