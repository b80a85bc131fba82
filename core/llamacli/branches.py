"""Trees of continuations over one cache: fork where a text could go on in several ways, keep what turns out best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.checks import is_whole
from llamacli.errors import CacheFull, ClosedError, InvalidRequestError
from llamacli.kv import NO_LEASE, Tenancy
from llamacli.model import KVTypes, Model
from llamacli.sampling import SamplerChain, SamplingParams
from llamacli.session import Session, eval_batch

_SLOT_BITS = 16
_MOST_SLOTS = 1 << _SLOT_BITS


@attrs.frozen
class KVPressure:
    """How full the cache is: `n_ctx` cells in all, those used by branches, each its own, and those that remain."""

    n_ctx: int
    cells_used: int

    @property
    def remaining(self) -> int:
        """Cells that are left."""
        return self.n_ctx - self.cells_used


@attrs.define(eq=False)
class _Branch:
    """A branch: its session, its lease, how many of its tokens it had from its parent, and whom it is related to."""

    session: Session
    lease: int
    fork_head: int
    parent: int
    children: set[int] = attrs.field(factory=set)


class Branches:
    """A store of branches, each named by a handle that no other branch ever had.

    A branch holds tokens, logits, sampler, draws and grammar; a fork gets a copy of all that and shares the pages.
    There are as many branches at a time as `n_leases`, 65536 at the most, and as many cells, those that a branch does
    not share with its parent, as `n_ctx` (default: all that the leases can hold). The handle 0 is never valid.

    Methods raise InvalidRequestError for a handle whose branch is gone, ClosedError after `drain`.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_leases: int = 16,
        n_ctx: int | None = None,
        seq_len: int | None = None,
        kv_type: KVTypes | None = None,
        seed: int = 1234,
    ):
        if not is_whole(n_leases) or not 0 <= n_leases <= _MOST_SLOTS:
            raise InvalidRequestError(f"n_leases must be an integer from 0 to {_MOST_SLOTS}, not {n_leases!r}")
        self._model, self._seed = model, seed
        self._cache = model.kv_cache(n_leases, seq_len=seq_len, kv_type=kv_type)
        self._tenancy = Tenancy(self._cache)
        self._n_ctx = n_leases * self._cache.seq_len if n_ctx is None else n_ctx
        self._generations: list[int] = []
        self._branches: dict[int, _Branch] = {}  # by handle
        self._free: list[int] = []
        self._drained = False

    def __len__(self) -> int:
        return len(self._branches)

    def __contains__(self, handle: int) -> bool:
        return handle in self._branches

    def create(self, tokens: Sequence[int] = ()) -> int:
        """A branch of its own that has evaluated `tokens`. Raises CacheFull if there is no lease or cell left."""
        self._expect_room(len(tokens))
        lease = self._lease()
        session = Session(self._model, sequence=self._cache.sequence(lease), seed=self._seed)
        handle = self._add(_Branch(session, lease, 0, 0))
        try:
            session.eval(tokens)
        except BaseException:
            self.prune(handle)
            raise
        return handle

    def fork(self, handle: int, *, clone_logits: bool = True) -> int:
        """A branch that goes on from where another stands; this takes a lease, but no cell."""
        parent = self._branch(handle)
        lease = self._lease()
        self._cache.seq_cp(parent.lease, lease)
        session = parent.session.fork(self._cache.sequence(lease))
        if not clone_logits:
            session.forget_logits()
        child = self._add(_Branch(session, lease, session.n_past, handle))
        parent.children.add(child)
        return child

    def decode(self, work: Mapping[int, Sequence[int]]) -> None:
        """Let branches go on with tokens, all of them in one pass over the weights.

        Raises CacheFull if there are not cells enough, and what `Session.eval` raises; no branch has changed then.
        """
        sessions = [(self._branch(handle).session, tokens) for handle, tokens in work.items()]
        self._expect_room(sum(map(len, work.values())))
        eval_batch(sessions)

    def prefill(self, handle: int, tokens: Sequence[int]) -> None:
        """Let one branch go on with tokens."""
        self.decode({handle: tokens})

    def step(self, handle: int, token: int) -> None:
        """Let one branch go on with a token."""
        self.decode({handle: [token]})

    def sample(self, handle: int, params: SamplingParams | SamplerChain | None = None) -> int:
        """Draw a branch's next token; `accept` and `step` make it part of the branch."""
        return self._branch(handle).session.draw(params)

    def accept(self, handle: int, token: int) -> None:
        """Let a branch's samplers and grammar know that a token was chosen."""
        self._branch(handle).session.accept(token)

    def tokens(self, handle: int) -> tuple[int, ...]:
        """All tokens of a branch."""
        return self._branch(handle).session.tokens

    def logits(self, handle: int) -> npt.NDArray[np.float32]:
        """The logits after a branch's last token, float32 [n_vocab]."""
        return self._branch(handle).session.logits

    def set_logits(self, handle: int, logits: npt.NDArray[np.float32]) -> None:
        """Put others in the place of a branch's logits, such as a mixture of several branches'."""
        target = self._branch(handle).session.logits
        if np.shape(logits) != target.shape:
            raise InvalidRequestError(f"logits of shape {np.shape(logits)} are not {target.shape}")
        target[:] = logits

    def children(self, handle: int) -> frozenset[int]:
        """The branches that were forked from this one and are still there."""
        return frozenset(self._branch(handle).children)

    def prune(self, handle: int) -> None:
        """Give a branch up. Raises InvalidRequestError while it has children."""
        children = self._branch(handle).children
        if children:
            raise InvalidRequestError(f"branch {handle} has {len(children)} children: prune them first, or all")
        self._remove(handle)

    def prune_subtree(self, handle: int) -> None:
        """Give a branch up, and all that were forked from it."""
        subtree = [handle]
        for parent in subtree:  # which grows on the way: a tree may be deeper than calls may nest
            subtree += self._branch(parent).children
        for descendant in reversed(subtree):
            self._remove(descendant)

    def retain_only(self, winner: int) -> None:
        """Give all branches up but one, which then has no parent and no children, and all its cells for its own."""
        branch = self._branch(winner)
        for handle in [other for other in self._branches if other != winner]:
            self._forget(handle)
        self._tenancy.retain(branch.lease)
        branch.parent, branch.fork_head = 0, 0
        branch.children.clear()

    def drain(self) -> None:
        """Give all branches up and the memory back; doing it twice does nothing."""
        if not self._drained:
            self._branches.clear()
            self._tenancy.evict_all()
            self._cache.close()
        self._drained = True

    def pressure(self) -> KVPressure:
        """How full the cache is. A fork adds nothing; a pruned branch gives back what it had since it was forked."""
        used = sum(branch.session.n_past - branch.fork_head for branch in self._branches.values())
        return KVPressure(self._n_ctx, used)

    def _branch(self, handle: int) -> _Branch:
        if self._drained:
            raise ClosedError("the branches are drained")
        branch = self._branches.get(handle) if is_whole(handle) else None
        if branch is None:
            raise InvalidRequestError(f"there is no branch {handle!r} any more, or never was")
        return branch

    def _lease(self) -> int:
        if self._drained:
            raise ClosedError("the branches are drained")
        lease = self._tenancy.acquire()
        if lease == NO_LEASE:
            raise CacheFull(f"all {self._cache.n_seq_max} leases are taken: prune a branch")
        return lease

    def _add(self, branch: _Branch) -> int:
        if not self._free:
            self._free.append(len(self._generations))
            self._generations.append(0)
        slot = self._free.pop()
        self._generations[slot] += 1
        handle = self._generations[slot] << _SLOT_BITS | slot
        self._branches[handle] = branch
        return handle

    def _remove(self, handle: int) -> None:
        branch = self._branches[handle]
        if branch.parent in self._branches:
            self._branches[branch.parent].children.discard(handle)
        self._tenancy.evict(branch.lease)
        self._forget(handle)

    def _forget(self, handle: int) -> None:
        del self._branches[handle]
        self._free.append(handle & (_MOST_SLOTS - 1))

    def _expect_room(self, n_tokens: int) -> None:
        left = self.pressure().remaining
        if n_tokens > left:
            raise CacheFull(f"{n_tokens} tokens do not fit into the {left} cells that are left of {self._n_ctx}")
