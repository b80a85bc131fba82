"""Trees of token sequences (branches) over one KV cache."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.branches.slot_map import MAX_SLOTS, SlotMap
from llamacli.engine.compiled_model import KVTypes
from llamacli.errors import CacheFull, ClosedError, InvalidRequestError
from llamacli.generation.stream import eval_batch
from llamacli.kv import NO_LEASE, SequencePool
from llamacli.model import Model
from llamacli.sampling import Candidates, Metrics, SamplerChain, SamplingParams, entropy, merge_logits, surprisal
from llamacli.session import Session
from llamacli.util.numbers import is_integer


@attrs.frozen
class KVPressure:
    """KV cache usage of branches, in cells.

    `n_ctx` is the total; cells shared with a parent count once in `cells_used`.
    """

    n_ctx: int
    cells_used: int

    @property
    def remaining(self) -> int:
        """Number of free cells."""
        return self.n_ctx - self.cells_used


@attrs.define(eq=False)
class _Branch:
    """Branch: session, lease, and position in the tree.

    `fork_head` is the number of tokens shared with the parent; `parent` and `children` are handles. With `measure`,
    `metrics` of the accepted tokens, and id, surprisal and entropy of the token `drawn` last.
    """

    session: Session
    lease: int
    fork_head: int
    parent: int
    metrics: Metrics = attrs.field(factory=Metrics)
    drawn: tuple[int, float, float] | None = None
    children: set[int] = attrs.field(factory=set)


class Branches:
    """Store of branches, addressed by handles.

    Handles are never reused, and 0 is never valid. A branch has tokens, logits, a sampler with its random generator, a
    grammar and metrics; a fork copies them and shares the KV cache pages, but has no `steer` function. `n_leases`
    limits the number of branches (up to 65536), `n_ctx_seq` the tokens of each (default: `config.n_ctx`), `n_ctx` the
    cells of all, where cells shared with a parent count once (default: as many as all leases can hold). `measure`
    computes metrics of accepted tokens, under the model and under the sampler, at the cost of some passes over the
    logits of each.

    Methods raise InvalidRequestError for the handle of a branch that does not exist, ClosedError after `drain`.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_leases: int = 16,
        n_ctx: int | None = None,
        n_ctx_seq: int | None = None,
        kv_type: KVTypes | None = None,
        seed: int = 1234,
        measure: bool = False,
    ):
        if not is_integer(n_leases) or not 0 <= n_leases <= MAX_SLOTS:
            raise InvalidRequestError(f"n_leases must be an integer from 0 to {MAX_SLOTS}, not {n_leases!r}")
        if n_ctx is not None and (not is_integer(n_ctx) or n_ctx < 0):
            raise InvalidRequestError(f"n_ctx must be an integer of at least 0, not {n_ctx!r}")
        self._model, self._seed, self._measure = model, seed, measure
        self._cache = model.kv_cache(n_leases, n_ctx_seq=n_ctx_seq, kv_type=kv_type)
        self._pool = SequencePool(self._cache)
        self._n_ctx = n_leases * self._cache.n_ctx_seq if n_ctx is None else n_ctx
        self._branches = SlotMap[_Branch]()
        self._drained = False

    def __len__(self) -> int:
        return len(self._branches)

    def __contains__(self, handle: int) -> bool:
        return handle in self._branches

    def create(self, tokens: Sequence[int] = (), params: SamplingParams | SamplerChain | None = None) -> int:
        """Create a root branch and evaluate `tokens`.

        It samples with `params` (default: greedy) from then on. Raises CacheFull if no lease or not enough cells are
        free, and what `Session.eval` raises; nothing has changed then.
        """
        self._expect_room(len(tokens))
        with self._lease() as lease:
            session = Session(self._model, sequence=self._cache.sequence(lease), seed=self._seed)
            if params is not None:
                session.params = params
            session.eval(tokens)
        return self._branches.add(_Branch(session, lease, 0, 0))

    def fork(self, handle: int, *, clone_logits: bool = True) -> int:
        """Fork a branch.

        A fork takes a lease, but no cell. Raises CacheFull if no lease is free.
        """
        parent = self._branch(handle)
        with self._lease() as lease:
            self._cache.seq_cp(parent.lease, lease)
            session = parent.session.fork(self._cache.sequence(lease))
        if not clone_logits:
            session.clear_logits()
        drawn = parent.drawn if clone_logits else None
        child = self._branches.add(_Branch(session, lease, session.n_past, handle, parent.metrics, drawn))
        parent.children.add(child)
        return child

    def set_seed(self, handle: int, seed: int) -> None:
        """Reseed a branch's random generator.

        Forks of a branch otherwise draw the same tokens.
        """
        self._branch(handle).session.set_seed(seed)

    def set_steer(self, handle: int, steer: Callable[[Candidates], None] | None) -> None:
        """Set a function that changes the candidates of each draw.

        None removes it. `steer(candidates)` changes `candidates.logits` in place or removes candidates. It is called
        after grammars, bans and the logit bias, before all other samplers. Forks do not inherit it. Raises
        InvalidRequestError if it cannot be called.
        """
        self._branch(handle).session.steer = steer

    def decode(self, work: Mapping[int, Sequence[int]]) -> None:
        """Evaluate tokens of several branches in one batch, {handle: tokens}.

        They count as generated, those of `prefill` as a prompt; see `Session.eval`. Raises CacheFull if not enough
        cells are free, and what `Session.eval` raises; no branch has changed then.
        """
        sessions = [(self._branch(handle).session, tokens) for handle, tokens in work.items()]
        self._expect_room(sum(map(len, work.values())))
        eval_batch(sessions, generated=[True] * len(sessions))
        self._clear_draws(handle for handle, tokens in work.items() if len(tokens))

    def prefill(
        self, handle: int, tokens: Sequence[int], *, all_logits: bool = False
    ) -> npt.NDArray[np.float32] | None:
        """Evaluate tokens of one branch.

        Returns the logits of each, float32 [n, n_vocab], with `all_logits`. Raises what `decode` raises.
        """
        session = self._branch(handle).session
        self._expect_room(len(tokens))
        logits = session.eval(tokens, all_logits=all_logits)
        self._clear_draws([handle] if len(tokens) else [])
        return logits

    def step(self, handle: int, token: int) -> None:
        """Evaluate one token of one branch."""
        self.decode({handle: [token]})

    def sample(self, handle: int, params: SamplingParams | SamplerChain | None = None) -> int:
        """Draw a branch's next token. `params`, if given, replace the branch's parameters.

        `accept` and `step` append the token. The logits are unchanged and can be sampled again.
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
        """Advance a branch's samplers, grammar and metrics by a token.

        Evaluate the token with `step` afterwards. Raises InvalidRequestError, changing nothing, if it is not in the
        vocabulary or the grammar does not allow it.
        """
        branch = self._branch(handle)
        branch.session.accept(token)
        if self._measure:
            branch.metrics = _metrics_after(branch, token)
            branch.drawn = None

    def metrics(self, handle: int) -> Metrics:
        """Surprisal, entropy and perplexity of a branch's accepted tokens.

        Each is computed under the model and under the sampler. Under the sampler, tokens that were not drawn have
        infinite values and do not count. Raises InvalidRequestError without `measure`.
        """
        metrics = self._branch(handle).metrics
        if not self._measure:
            raise InvalidRequestError("metrics are off: create Branches with measure=True")
        return metrics

    def legal_priors(self, handle: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Tokens that a branch's grammar allows next, with their probabilities, renormalized.

        Returns sorted ids, int32 [n], and the softmax of their logits, float64 [n]; without a grammar, all tokens with
        finite logits. Raises InvalidRequestError if there is no such token.
        """
        candidates = self._branch(handle).session.legal()
        return candidates.ids, candidates.probabilities()

    def is_token_legal(self, handle: int, token: int) -> bool:
        """Check that a token is in `legal_priors`."""
        ids = self._branch(handle).session.legal().ids
        return is_integer(token) and token in ids

    def tokens(self, handle: int) -> tuple[int, ...]:
        """Get all tokens of a branch."""
        return self._branch(handle).session.tokens

    def logits(self, handle: int) -> npt.NDArray[np.float32]:
        """Get the logits after a branch's last token, float32 [n_vocab]."""
        return self._branch(handle).session.logits

    def set_logits(self, handle: int, logits: npt.NDArray[np.float32]) -> None:
        """Replace a branch's logits, float32 [n_vocab]."""
        self._branch(handle).session.logits = logits
        self._clear_draws([handle])

    def merge_logits(self, handle: int, weights: Mapping[int, float], *, alpha: float = 0.0) -> None:
        """Replace a branch's logits by the weighted product of distributions.

        `weights` maps handles to the weights of their branches' distributions. Weights `{handle: 1, other: -1}` and an
        alpha of 0.1 are contrastive decoding; see `llamacli.sampling.merge_logits` for the formula and other uses. The
        plausibility threshold `alpha` applies to the branch's own distribution, whatever its weight. For branches of
        different models, use that function and `set_logits`. Raises InvalidRequestError, changing nothing, for an
        invalid handle, weight, logit or alpha.
        """
        if alpha:
            weights = {handle: 0.0, **weights}  # alpha applies to the first
        merged = merge_logits([self.logits(other) for other in weights], list(weights.values()), alpha=alpha)
        self.set_logits(handle, merged)

    def parent(self, handle: int) -> int:
        """Get a branch's parent, 0 for a root."""
        return self._branch(handle).parent

    def children(self, handle: int) -> frozenset[int]:
        """Get the existing branches that were forked from this one."""
        return frozenset(self._branch(handle).children)

    def prune(self, handle: int) -> None:
        """Remove a branch. Raises InvalidRequestError if it has children."""
        children = self._branch(handle).children
        if children:
            raise InvalidRequestError(
                f"branch {handle} has {len(children)} children: prune them first, or use prune_subtree"
            )
        self._remove(handle)

    def prune_subtree(self, handle: int) -> None:
        """Remove a branch and all its descendants."""
        subtree = [handle]
        for parent in subtree:  # the list grows during the loop: a tree may be deeper than the recursion limit
            subtree += self._branch(parent).children
        for descendant in reversed(subtree):
            self._remove(descendant)

    def retain_only(self, winner: int) -> None:
        """Remove all branches but one, which becomes a root.

        It owns all its cells then.
        """
        branch = self._branch(winner)
        for handle in [other for other in self._branches if other != winner]:
            self._branches.remove(handle)
        self._pool.release_all_but(branch.lease)
        branch.parent, branch.fork_head = 0, 0
        branch.children.clear()

    def drain(self) -> None:
        """Remove all branches and release the memory; draining twice does nothing."""
        if not self._drained:
            self._branches.clear()
            self._pool.evict_all()
            self._cache.close()
        self._drained = True

    def pressure(self) -> KVPressure:
        """Get the KV cache usage.

        A fork adds no cells; pruning a branch frees those since it was forked.
        """
        used = sum(branch.session.n_past - branch.fork_head for branch in self._branches.values())
        return KVPressure(self._n_ctx, used)

    def _branch(self, handle: int) -> _Branch:
        if self._drained:
            raise ClosedError("the branches are drained")
        branch = self._branches.get(handle) if is_integer(handle) else None
        if branch is None:
            raise InvalidRequestError(f"branch {handle!r} does not exist: it was pruned or never created")
        return branch

    def _clear_draws(self, handles: Iterable[int]) -> None:
        """Drop the tokens drawn from logits that were replaced."""
        for handle in handles:
            self._branches[handle].drawn = None

    @contextlib.contextmanager
    def _lease(self) -> Iterator[int]:
        if self._drained:
            raise ClosedError("the branches are drained")
        lease = self._pool.acquire()
        if lease == NO_LEASE:
            raise CacheFull(f"all {self._cache.n_seq_max} leases are in use: prune a branch")
        try:
            yield lease
        except BaseException:
            self._pool.evict(lease)
            raise

    def _remove(self, handle: int) -> None:
        branch = self._branches[handle]
        if branch.parent in self._branches:
            self._branches[branch.parent].children.discard(handle)
        self._pool.evict(branch.lease)
        self._branches.remove(handle)

    def _expect_room(self, n_tokens: int) -> None:
        left = self.pressure().remaining
        if n_tokens > left:
            raise CacheFull(f"{n_tokens} tokens do not fit into the {left} free cells of {self._n_ctx}")


def _metrics_after(branch: _Branch, token: int) -> Metrics:
    model, sampling, session = branch.metrics.model, branch.metrics.sampling, branch.session
    if session.has_logits:
        model = model.after(surprisal(session.logits, token), entropy(session.logits))
    if branch.drawn is not None and branch.drawn[0] == token:
        _, *drawn = branch.drawn
        return Metrics(model, sampling.after(*drawn))
    return Metrics(model, sampling.after(math.inf, math.inf))
