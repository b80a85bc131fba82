import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

import tiny_models
from conftest import LoadTiny
from llamacli import CacheFull, ClosedError, InvalidRequestError, Model, SamplingParams, load_model
from llamacli.branches import Branches
from llamacli.engine import ReferenceEngine

LONG = np.random.RandomState(7).randint(0, 128, 100).tolist()
RANDOM = SamplingParams(temp=1.0, top_k=40, penalty=1.2)


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa")


@pytest.fixture
def branches(model: Model) -> Branches:
    return Branches(model, n_leases=6, seq_len=64)


def logits_after(model: Model, tokens: tuple[int, ...]) -> np.ndarray:
    with model.create_session(reuse=False) as session:
        session.eval(tokens)
        return session.logits


def test_a_fork_goes_on_as_its_parent_would(model: Model, branches: Branches) -> None:
    root = branches.create(LONG[:20])
    for _ in range(3):
        branches.accept(root, token := branches.sample(root, RANDOM))
        branches.step(root, token)
    children = [branches.fork(root) for _ in range(3)]
    drawn = [[branches.sample(branch, RANDOM) for _ in range(5)] for branch in [root, *children]]
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
    branches.decode({children[0]: [1, 2, 3], children[2]: [4]})
    assert branches.tokens(children[1]) == branches.tokens(root)
    for handle in (root, *children):
        expected = logits_after(model, branches.tokens(handle))
        if handle in (children[0], children[2]):
            np.testing.assert_array_equal(branches.logits(handle), expected)


def test_logits_may_be_left_behind_or_replaced(model: Model, branches: Branches) -> None:
    root = branches.create(LONG[:5])
    child = branches.fork(root, clone_logits=False)
    with pytest.raises(InvalidRequestError, match="no logits"):
        branches.sample(child)
    wanted = np.zeros(128, np.float32)
    wanted[77] = 1
    branches.set_logits(root, wanted)
    assert branches.sample(root) == 77
    with pytest.raises(InvalidRequestError, match="shape"):
        branches.set_logits(root, wanted[:5])


def test_pressure_counts_what_is_a_branchs_own(model: Model) -> None:
    branches = Branches(model, n_leases=4, seq_len=64, n_ctx=50)
    root = branches.create(LONG[:30])
    child = branches.fork(root)
    assert (branches.pressure().cells_used, branches.pressure().remaining) == (30, 20)
    branches.prefill(child, LONG[:15])
    with pytest.raises(CacheFull, match="6 tokens do not fit into the 5 cells that are left of 50"):
        branches.decode({root: [1, 2, 3], child: [4, 5, 6]})
    assert (len(branches.tokens(root)), len(branches.tokens(child))) == (30, 45)
    branches.prune(child)
    assert branches.pressure().cells_used == 30


def test_a_tree_may_be_deeper_than_calls_nest(model: Model) -> None:
    depth = sys.getrecursionlimit() + 1
    branches = Branches(model, n_leases=depth + 1, seq_len=4)
    other, root = branches.create(), branches.create()
    leaf = root
    for _ in range(depth - 1):
        leaf = branches.fork(leaf)
    branches.prune_subtree(root)
    assert (len(branches), other in branches, leaf in branches) == (1, True, False)


@pytest.mark.parametrize("n_leases", [-1, 65537, 1.5])
def test_leases_have_handles_of_their_own(n_leases: float, model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="n_leases must be an integer from 0 to 65536"):
        Branches(model, n_leases=n_leases)


def test_leases_run_out(branches: Branches) -> None:
    root = branches.create([1])
    forks = [branches.fork(root) for _ in range(5)]
    with pytest.raises(CacheFull, match="all 6 leases are taken"):
        branches.fork(root)
    with pytest.raises(CacheFull):
        branches.create()
    branches.prune(forks[0])
    assert branches.fork(root) not in forks, "a handle never comes again"


def test_a_branch_that_cannot_be_begun_takes_nothing(branches: Branches) -> None:
    with pytest.raises(InvalidRequestError, match="index 1"):
        branches.create([1, 500])
    assert (len(branches), branches.pressure().cells_used) == (0, 0)
    [branches.create([1]) for _ in range(6)]


def test_draining(model: Model, branches: Branches) -> None:
    used = model.kv_pool().n_used_bytes
    root = branches.create(LONG[:20])
    branches.fork(root)
    branches.drain()
    branches.drain()
    assert model.kv_pool().n_used_bytes == used
    for call in (lambda: branches.tokens(root), branches.create):
        with pytest.raises(ClosedError, match="drained"):
            call()


class BranchMachine(RuleBasedStateMachine):
    """`tree`: of each living handle, its parent, its tokens and how many of them it had from its parent."""

    handles = Bundle("handles")
    model: Model

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches(self.model, n_leases=5, seq_len=40, n_ctx=90)
        self.tree: dict[int, tuple[int, list[int], int]] = {}

    def children(self, handle: int) -> set[int]:
        return {other for other, (parent, _, _) in self.tree.items() if parent == handle}

    def subtree(self, handle: int) -> set[int]:
        return {handle}.union(*(self.subtree(child) for child in self.children(handle)))

    @property
    def used(self) -> int:
        return sum(len(tokens) - head for _, tokens, head in self.tree.values())

    @rule(target=handles, tokens=st.lists(st.integers(0, 127), max_size=30))
    def create(self, tokens: list[int]) -> object:
        try:
            handle = self.branches.create(tokens)
        except CacheFull:
            assert len(self.tree) == 5 or self.used + len(tokens) > 90
            return multiple()
        assert handle not in self.tree
        self.tree[handle] = (0, tokens, 0)
        return handle

    @rule(target=handles, handle=handles)
    def fork(self, handle: int) -> object:
        try:
            child = self.branches.fork(handle)
        except InvalidRequestError:
            assert handle not in self.tree
            return multiple()
        except CacheFull:
            assert len(self.tree) == 5
            return multiple()
        tokens = self.tree[handle][1]
        self.tree[child] = (handle, list(tokens), len(tokens))
        return child

    @rule(work=st.dictionaries(handles, st.lists(st.integers(0, 127), min_size=1, max_size=5), max_size=4))
    def decode(self, work: dict[int, list[int]]) -> None:
        valid = work.keys() <= self.tree.keys()
        fits = valid and all(len(self.tree[handle][1]) + len(tokens) <= 40 for handle, tokens in work.items())
        try:
            self.branches.decode(work)
        except Exception:
            assert not fits or self.used + sum(map(len, work.values())) > 90
            return
        assert fits
        for handle, tokens in work.items():
            self.tree[handle][1].extend(tokens)

    @rule(handle=handles)
    def prune(self, handle: int) -> None:
        allowed = handle in self.tree and not self.children(handle)
        try:
            self.branches.prune(handle)
        except InvalidRequestError:
            assert not allowed
        else:
            assert allowed
            del self.tree[handle]

    @rule(handle=handles)
    def prune_subtree(self, handle: int) -> None:
        if handle in self.tree:
            self.branches.prune_subtree(handle)
            for gone in self.subtree(handle):
                del self.tree[gone]

    @rule(handle=consumes(handles))
    def retain_only(self, handle: int) -> None:
        if handle in self.tree:
            self.branches.retain_only(handle)
            self.tree = {handle: (0, self.tree[handle][1], 0)}

    @invariant()
    def the_store_is_as_the_tree(self) -> None:
        assert len(self.branches) == len(self.tree)
        assert self.branches.pressure().cells_used == self.used
        for handle, (_, tokens, _) in self.tree.items():
            assert list(self.branches.tokens(handle)) == tokens
            assert self.branches.children(handle) == self.children(handle)
        cells = {int(page) for seq in range(5) for page in self.branches._cache.sequence(seq).tables[0] if page}
        assert self.branches._cache.pool.groups[0].n_used == len(cells)

    def teardown(self) -> None:
        self.branches.drain()
        assert self.model.kv_pool().n_used_bytes == 0


@pytest.fixture(scope="module")
def machine(tmp_path_factory, plugins) -> type[RuleBasedStateMachine]:
    path = tiny_models.write_llama(tmp_path_factory.mktemp("branches") / "m.gguf")
    BranchMachine.model = load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())
    return BranchMachine


def test_random_trees(machine) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))
