"""Packed copies of models: cache files, mapped at the next start.

Packing the weights of a file takes longer than reading it. So the packed bytes are written to a file in the background
once a model is loaded, and mapped read-only when the same file is loaded again: processes that map one copy share its
memory.

A copy is named by a digest of all that its bytes depend on: the model's files (device and path excepted), the mode, and
the sources of packing. All of it is checked before any of it is used, against sums that are computed at the speed of
memory. A copy that is not as it was written is made again. Nothing is lost with it: this is a cache, and failures to
write it are no errors.

A model that is larger than the free memory is run from its copy, which is written tensor by tensor while it is packed
(`NewCopy`). A thread reads matrices ahead of their use, those that do not fit in each pass (`Reader`), and experts once
the router has chosen them (`MappedStack`). A matrix is checked when it is first used.
"""

from __future__ import annotations

from llamacli.engine.packed_copies.folder import CopyInfo, copies, copy_key, limit, remove_copies, sources_digest
from llamacli.engine.packed_copies.reading import PackedCopy, open_copy
from llamacli.engine.packed_copies.streaming import MappedStack, Reader
from llamacli.engine.packed_copies.writing import NewCopy, finish_copies, new_copy, save_copy

__all__ = (
    "CopyInfo",
    "MappedStack",
    "NewCopy",
    "PackedCopy",
    "Reader",
    "copies",
    "copy_key",
    "finish_copies",
    "limit",
    "new_copy",
    "open_copy",
    "remove_copies",
    "save_copy",
    "sources_digest",
)
