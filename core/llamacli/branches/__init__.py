"""Trees of continuations over one cache: fork where a text could go on in several ways, keep what turns out best."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import CacheFull, ClosedError, InvalidRequestError
from llamacli.kv import NO_LEASE, SequencePool
from llamacli.model import KVTypes, Model
from llamacli.sampling import Metrics, SamplerChain, SamplingParams, entropy, merge_logits, surprisal
from llamacli.session import Session, eval_batch
from llamacli.util.numbers import is_integer

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
    """A branch: its session, its lease, how many of its tokens it had from its parent, and whom it is related to.

    Where branches are measured, `metrics`, and of the token that was drawn last its id, surprisal and entropy.
    """

    session: Session
    lease: int
    fork_head: int
    parent: int
    metrics: Metrics = attrs.field(factory=Metrics)
    drawn: tuple[int, float, float] | None = None
    children: set[int] = attrs.field(factory=set)


class Branches:
    """A store of branches, each named by a handle that no other branch ever had.

    A branch holds tokens, logits, sampler, draws, grammar and metrics; a fork gets a copy of all that and shares the
    pages. There are as many branches at a time as `n_leases`, 65536 at the most, and as many cells, those that a branch
    does not share with its parent, as `n_ctx` (default: all that the leases can hold). The handle 0 is never valid.
    `measure` has the tokens that are accepted measured, which takes some passes over the logits of each.

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
        measure: bool = False,
    ):
        if not is_integer(n_leases) or not 0 <= n_leases <= _MOST_SLOTS:
            raise InvalidRequestError(f"n_leases must be an integer from 0 to {_MOST_SLOTS}, not {n_leases!r}")
        if n_ctx is not None and (not is_integer(n_ctx) or n_ctx < 0):
            raise InvalidRequestError(f"n_ctx must be an integer of at least 0, not {n_ctx!r}")
        self._model, self._seed, self._measure = model, seed, measure
        self._cache = model.kv_cache(n_leases, seq_len=seq_len, kv_type=kv_type)
        self._tenancy = SequencePool(self._cache)
        self._n_ctx = n_leases * self._cache.seq_len if n_ctx is None else n_ctx
        self._generations: list[int] = []
        self._branches: dict[int, _Branch] = {}  # by handle
        self._free: list[int] = []
        self._drained = False

    def __len__(self) -> int:
        return len(self._branches)

    def __contains__(self, handle: int) -> bool:
        return handle in self._branches

    def create(self, tokens: Sequence[int] = (), params: SamplingParams | SamplerChain | None = None) -> int:
        """A branch of its own that has evaluated `tokens`, and samples by `params` until told otherwise; or greedily.

        Raises CacheFull if there is no lease or cell left.
        """
        self._expect_room(len(tokens))
        with self._lease() as lease:
            session = Session(self._model, sequence=self._cache.sequence(lease), seed=self._seed)
            if params is not None:
                session.params = params
            session.eval(tokens)
        return self._add(_Branch(session, lease, 0, 0))

    def fork(self, handle: int, *, clone_logits: bool = True) -> int:
        """A branch that goes on from where another stands; this takes a lease, but no cell."""
        parent = self._branch(handle)
        with self._lease() as lease:
            self._cache.seq_cp(parent.lease, lease)
            session = parent.session.fork(self._cache.sequence(lease))
        if not clone_logits:
            session.forget_logits()
        drawn = parent.drawn if clone_logits else None
        child = self._add(_Branch(session, lease, session.n_past, handle, parent.metrics, drawn))
        parent.children.add(child)
        return child

    def set_seed(self, handle: int, seed: int) -> None:
        """Start a branch's random draws anew; forks of one branch would draw the same."""
        self._branch(handle).session.set_seed(seed)

    def decode(self, work: Mapping[int, Sequence[int]]) -> None:
        """Let branches go on with tokens, all of them in one pass over the weights.

        Raises CacheFull if there are not cells enough, and what `Session.eval` raises; no branch has changed then.
        """
        sessions = [(self._branch(handle).session, tokens) for handle, tokens in work.items()]
        self._expect_room(sum(map(len, work.values())))
        eval_batch(sessions)
        self._forget_draws(work)

    def prefill(
        self, handle: int, tokens: Sequence[int], *, all_logits: bool = False
    ) -> npt.NDArray[np.float32] | None:
        """Let one branch go on with tokens; the logits after each, float32 [n, n_vocab], if `all_logits` asks for them.

        Raises what `decode` raises.
        """
        session = self._branch(handle).session
        self._expect_room(len(tokens))
        logits = session.eval(tokens, all_logits=all_logits)
        self._forget_draws([handle])
        return logits

    def step(self, handle: int, token: int) -> None:
        """Let one branch go on with a token."""
        self.decode({handle: [token]})

    def sample(self, handle: int, params: SamplingParams | SamplerChain | None = None) -> int:
        """Draw a branch's next token, by the parameters of the last time unless there are others, from then on.

        `accept` and `step` make it part of the branch. The logits stay as they are, to be drawn from again.
        """
        branch = self._branch(handle)
        if params is not None:
            branch.session.params = params
        token = branch.session.draw()
        if self._measure:
            candidates = branch.session.candidates
            index = int(np.searchsorted(candidates.ids, token))
            branch.drawn = token, candidates.surprisal(index), candidates.entropy()
        return token

    def accept(self, handle: int, token: int) -> None:
        """Let a branch's samplers, grammar and metrics know that a token was chosen; `step` comes after that.

        Raises InvalidRequestError, changing nothing, if it is not in the vocabulary or the grammar does not allow it.
        """
        branch = self._branch(handle)
        branch.session.accept(token)
        if self._measure:
            branch.metrics = _metrics_after(branch, token)
            branch.drawn = None

    def metrics(self, handle: int) -> Metrics:
        """How well the tokens that a branch has accepted were foreseen, by its logits and by what it drew from.

        Of tokens that were not drawn the latter is infinite, and does not count. Raises InvalidRequestError if the
        branches are not measured.
        """
        metrics = self._branch(handle).metrics
        if not self._measure:
            raise InvalidRequestError("these branches are not measured: make them with measure=True")
        return metrics

    def legal_priors(self, handle: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """The tokens that a branch's grammar lets through next, and how probable they are among themselves.

        Ids, rising, and the softmax of their logits; all tokens that have a finite logit if there is no grammar.
        Raises InvalidRequestError if there is no such token.
        """
        candidates = self._branch(handle).session.legal()
        return candidates.ids, candidates.probabilities()

    def is_token_legal(self, handle: int, token: int) -> bool:
        """Whether a token is one of `legal_priors`."""
        ids = self._branch(handle).session.legal().ids
        return is_integer(token) and token in ids

    def tokens(self, handle: int) -> tuple[int, ...]:
        """All tokens of a branch."""
        return self._branch(handle).session.tokens

    def logits(self, handle: int) -> npt.NDArray[np.float32]:
        """The logits after a branch's last token, float32 [n_vocab]."""
        return self._branch(handle).session.logits

    def set_logits(self, handle: int, logits: npt.NDArray[np.float32]) -> None:
        """Put others in the place of a branch's logits, float32 [n_vocab]."""
        self._branch(handle).session.logits = logits
        self._forget_draws([handle])

    def merge_logits(self, handle: int, weights: Mapping[int, float], *, alpha: float = 0.0) -> None:
        """Put the weighted product of branches' distributions in the place of a branch's logits.

        With weights `{handle: 1, other: -1}` and an alpha of 0.1 this is contrastive decoding; see
        `llamacli.sampling.merge_logits` for what else it can be, and for the formula. What is plausible is for the
        branch itself to say, whatever its own weight. For branches of different models, merge and `set_logits`.
        Raises InvalidRequestError, changing nothing, if something is wrong with a handle, weight, logit or alpha.
        """
        if alpha:
            weights = {handle: 0.0, **weights}  # the first is who says what is plausible
        merged = merge_logits([self.logits(other) for other in weights], list(weights.values()), alpha=alpha)
        self.set_logits(handle, merged)

    def parent(self, handle: int) -> int:
        """The branch that this one was forked from, 0 if there is none."""
        return self._branch(handle).parent

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
        self._tenancy.release_all_but(branch.lease)
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
        branch = self._branches.get(handle) if is_integer(handle) else None
        if branch is None:
            raise InvalidRequestError(f"there is no branch {handle!r} any more, or never was")
        return branch

    def _forget_draws(self, handles: Iterable[int]) -> None:
        """What was drawn from logits that are no more cannot be accepted as drawn."""
        for handle in handles:
            self._branches[handle].drawn = None

    @contextlib.contextmanager
    def _lease(self) -> Iterator[int]:
        """A lease for a new branch, given back if there comes to be none."""
        if self._drained:
            raise ClosedError("the branches are drained")
        lease = self._tenancy.acquire()
        if lease == NO_LEASE:
            raise CacheFull(f"all {self._cache.n_seq_max} leases are taken: prune a branch")
        try:
            yield lease
        except BaseException:
            self._tenancy.evict(lease)
            raise

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


def _metrics_after(branch: _Branch, token: int) -> Metrics:
    """Those of a branch when it has accepted a token, which its logits are still there to measure."""
    model, sampling, session = branch.metrics.model, branch.metrics.sampling, branch.session
    if session.has_logits:
        model = model.after(surprisal(session.logits, token), entropy(session.logits))
    if branch.drawn is not None and branch.drawn[0] == token:
        _, *drawn = branch.drawn
        return Metrics(model, sampling.after(*drawn))
    return Metrics(model, sampling.after(math.inf, math.inf))
