"""Pipeline stages on the nodes of a Ray cluster: `llamacli serve --ray --split-layers`.

Ray places workers and says why one has died. Activations go over the workers' own connections.
"""

from __future__ import annotations

import logging
import secrets
import threading
from pathlib import Path
from typing import Any

import attrs
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llamacli.errors import StageError
from llamacli.serve.ray import deployment
from llamacli.serve.ray.errors import ClusterError, reason_of
from llamacli.serve.ray.settings import RaySettings
from llamacli.stages.link import Address, StagedEngine
from llamacli.stages.worker import Worker, listen
from llamacli.util.settings import LoadMode

START_S = 60.0
"""Seconds in which a node has to start a worker."""

_SECRET_BYTES = 32
_REASON_S = 1.0

_log = logging.getLogger(__name__)


class StageActor:
    """Worker on a node, as Ray makes it."""

    def __init__(self, path: str, secret: bytes, threads: int, load: str):
        self._listener = listen((ray.util.get_node_ip_address(), 0))
        worker = Worker(Path(path), secret, threads=threads, load=LoadMode(load))
        threading.Thread(target=worker.serve, args=(self._listener,), daemon=True).start()

    def address(self) -> Address:
        """Address of the worker, once it listens."""
        host, port = self._listener.getsockname()[:2]
        return host, port


class _NodeGoneError(ClusterError):
    """A node that Ray still lists starts nothing."""


@attrs.frozen(eq=False)
class _Placed:
    """Worker that runs: its node and actor."""

    node: str
    actor: Any


class RayWorkers:
    """Workers on all nodes of a cluster but this process's, see `llamacli.stages.link.Workers`.

    They end with this process. As `Spares`, the node with the fewest workers takes the layers of a lost one.
    """

    def __init__(self, path: Path, cluster: RaySettings):
        """Connect to the cluster. Raises ClusterError."""
        deployment.connect(cluster)
        self._path, self._cpus = str(path.resolve()), cluster.cpus
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._placed: dict[Address, _Placed] = {}
        self._load = ""

    def engine(self, threads: int | None, load: str) -> StagedEngine:
        """Engine of a model on this process and the present nodes.

        Raises ClusterError if there is no node beside this one, or one does not start a worker.
        """
        for address in [*self._placed]:
            self._end(address)
        self._load = load
        nodes = _other_nodes()
        if not nodes:
            raise ClusterError("the Ray cluster has no node beside this one to divide the layers with")
        addresses, failed = list[Address](), list[_NodeGoneError]()
        for node in nodes:
            try:
                addresses.append(self._place(node))
            except _NodeGoneError as error:  # which Ray has not noticed yet
                _log.warning("%s", error)
                failed.append(error)
        if not addresses:
            raise failed[-1]
        return StagedEngine(addresses, self._secret, threads=threads, spares=self, load=LoadMode(load))

    def __len__(self) -> int:
        """See Spares: each node may be tried once."""
        return len(_other_nodes())

    def exchange(self, lost: Address) -> Address:
        """See Spares."""
        self._end(lost)
        used = [one.node for one in self._placed.values()]
        reason = "no node of the Ray cluster is left beside this one"
        for node in sorted(_other_nodes(), key=used.count):
            try:
                return self._place(node, is_shared=node in used)
            except ClusterError as error:
                _log.warning("%s", error)
                reason = str(error)
        raise StageError(reason)

    def _place(self, node: str, *, is_shared: bool = False) -> Address:
        """Start a worker on a node; shared CPUs are not reserved."""
        cpus = self._cpus or _other_nodes().get(node, 1.0)
        actor = (
            ray.remote(StageActor)
            .options(
                num_cpus=0 if is_shared else cpus,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(self._path, self._secret, max(1, int(cpus)), self._load)
        )
        try:
            address: Address = ray.get(actor.address.remote(), timeout=START_S)
        except ray.exceptions.GetTimeoutError:
            ray.kill(actor)
            raise ClusterError(f"node {node} has not started a worker with {cpus:g} CPUs in {START_S:g} s") from None
        except ray.exceptions.RayError as error:
            kind = ClusterError if getattr(error, "actor_init_failed", False) else _NodeGoneError
            raise kind(f"node {node} cannot start a worker: {_reason(error)}") from error
        self._placed[address] = _Placed(node, actor)
        _log.info("worker %s:%d runs on node %s with %g CPUs", *address, node, cpus)
        return address

    def _end(self, address: Address) -> None:
        placed = self._placed.pop(address)
        try:
            ray.get(placed.actor.address.remote(), timeout=_REASON_S)
        except ray.exceptions.RayError as error:
            _log.warning("worker %s:%d on node %s: %s", *address, placed.node, _reason(error))
        ray.kill(placed.actor)


def _reason(error: Exception) -> str:
    """Error of an actor's own code, else what Ray says last."""
    if getattr(error, "actor_init_failed", False):
        return reason_of(str(error))
    return [line.strip() for line in str(error).splitlines() if line.strip()][-1]


def _other_nodes() -> dict[str, float]:
    """CPUs of the other nodes that live, by their ids."""
    own = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]}
    return {node: cpus for node, cpus in nodes.items() if cpus > 0 and node != own}
