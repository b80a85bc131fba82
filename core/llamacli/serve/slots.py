"""Slots: texts under numbers, whose cached states are saved, restored and erased.

Clients of llama-server address the caches of their conversations so. All slots share one prefix cache here: a slot is
the tokens of the last text with its number, and holds no memory of its own.
"""

from __future__ import annotations

from pathlib import Path

from llamacli.errors import OutOfMemoryError, StateError
from llamacli.kv import KVSequence, snapshot
from llamacli.serve.cache import CacheMemory
from llamacli.serve.errors import BadRequestError
from llamacli.util.files import open_own


class Slots:
    """Slots of a model; methods may be called from any thread."""

    def __init__(self, memory: CacheMemory):
        self._memory = memory
        self._texts: dict[int, tuple[list[int], str]] = {}

    def note(self, slot: int, sequence: KVSequence) -> None:
        """Remember a sequence's tokens and adapters as a slot's text."""
        self._texts[slot] = [*sequence.tokens], sequence.adapters

    def save(self, slot: int, path: Path) -> tuple[int, int]:
        """Write the cached state of a slot.

        Returns the number of its tokens, and of the bytes of the file.
        Raises BadRequestError if nothing of it is cached, OSError if the file cannot be written.
        """
        tokens, adapters = self._texts.get(slot, ([], ""))
        sequence = self._memory.new_sequence(adapters)
        try:
            if not self._memory.reuse(sequence, [*tokens, 0]):  # the last token is never reused
                raise BadRequestError(f"slot {slot} has no cached text", "id")
            return len(sequence.tokens), snapshot.write(path, {0: sequence})
        finally:
            sequence.close()

    def restore(self, slot: int, path: Path) -> tuple[int, int]:
        """Read a state into the prefix cache, as a slot's text.

        Returns the number of its tokens, and of the bytes of the file.
        Raises BadRequestError for a file that is not a state of this model, OSError if it cannot be read.
        """
        with open_own(path) as file:
            data = file.read()
        pool = self._memory.pool
        try:
            state = snapshot.load(data, pool)
            saved = state.sequences[0]
            sequence = self._memory.new_sequence(saved.adapters)
            try:
                state.restore({0: sequence})
                self._memory.keep(sequence)
                self.note(slot, sequence)
            finally:
                sequence.close()
        except (StateError, KeyError) as error:
            raise BadRequestError(f"{path.name}: {error}", "filename") from None
        except OutOfMemoryError:
            raise BadRequestError(f"{path.name}: the cache has no room for its {len(saved.tokens)} tokens") from None
        return len(saved.tokens), len(data)

    def erase(self, slot: int) -> int:
        """Forget a slot, and evict what is cached of its text.

        Returns the number of its tokens.
        """
        tokens, adapters = self._texts.pop(slot, ([], ""))
        self._memory.forget(tokens, adapters)
        return len(tokens)
