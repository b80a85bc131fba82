"""Deployment of the replicas with Ray Serve, and connection to a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import attrs
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from llamacli.serve.http.local import version
from llamacli.serve.ray.errors import ClusterError, reason_of
from llamacli.serve.ray.messages import Route, Setup
from llamacli.serve.ray.replica import Replica, expect_version
from llamacli.serve.ray.settings import RaySettings
from llamacli.serve.settings import EngineSettings

CONNECT_S = 5.0
REPORT_S = 1.0
"""Seconds between reports of a replica to the routers."""
SPARE_CALLS = 64
"""Calls that Ray Serve passes to a replica beyond its limits, so that the engine's own queue refuses them."""
TARGET_SHARE = 0.7
"""Share of `max_running` that running requests of a replica take before another replica is started."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5, 30
ANSWER_S = 10.0
_POLL_S = 0.2

_log = logging.getLogger(__name__)


class ServedReplica(Replica):
    """Replica as Ray Serve makes it. `setup` has the fields of Setup."""

    def __init__(self, wanted_version: str, setup: Mapping[str, Any]):
        expect_version(wanted_version)
        super().__init__(Setup(**setup), serve.get_replica_context().replica_id.unique_id)

    def __del__(self) -> None:  # what Ray Serve calls when the replica has drained
        with contextlib.suppress(AttributeError):  # __init__ has failed
            self.close()


def connect(settings: RaySettings) -> float:
    """Connect to the cluster; the CPUs of a replica.

    Raises ClusterError if there is none at the address, or none of its nodes has as many CPUs.
    """
    address = settings.address
    if address not in ("auto", "local"):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise ClusterError(f"there is no Ray cluster at {address}: {error}") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a new cluster would report to Ray's makers
    try:
        ray.init(
            address=address,
            namespace="llamacli",
            include_dashboard=False if address == "local" else None,
            logging_level=logging.WARNING,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        hint = "its nodes need one version of Ray and of Python"
        if address == "auto":
            hint = "start one with `ray start --head`, or give --ray=local"
        raise ClusterError(f"the Ray cluster {address!r} cannot be joined: {error} ({hint})") from error
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    sizes = [float(size) for size in nodes if size > 0]
    if not sizes:
        raise ClusterError(f"the Ray cluster {address!r} has no node with CPUs")
    cpus = settings.cpus or min(sizes)
    if cpus > max(sizes):
        raise ClusterError(f"no node of the cluster has {cpus:g} CPUs: the largest has {max(sizes):g} (see --ray-cpus)")
    return cpus


def deploy(settings: RaySettings, limits: EngineSettings, setup: Setup) -> Any:
    """Start the replicas, or join those with equal settings; their handle.

    Replicas with other settings are replaced one after the other: each ends when its requests have, or after
    `setup.shutdown_timeout` seconds, and what is left is repeated on others.
    """
    serve.start(proxy_location="Disabled")
    fewest, most = setup.replicas
    scale: dict[str, Any] = {"num_replicas": fewest}
    if most > fewest:
        target = max(1.0, TARGET_SHARE * limits.max_running)
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=fewest, max_replicas=most, initial_replicas=fewest, target_ongoing_requests=target,
                upscale_delay_s=30, downscale_delay_s=600,
            )
        }  # fmt: skip
    if _running_setup(settings.app) == setup:
        _log.info("the application %r runs with these settings: it is joined", settings.app)
        return serve.get_app_handle(settings.app)
    most_calls = limits.max_running + limits.extra_running + limits.max_queue + SPARE_CALLS
    deployment = serve.deployment(ServedReplica).options(
        name="Replica",
        ray_actor_options={"num_cpus": setup.cpus},
        max_ongoing_requests=most_calls,
        max_queued_requests=most_calls,  # of those that wait for a replica to start
        graceful_shutdown_timeout_s=setup.shutdown_timeout,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(
            request_router_class="llamacli.serve.ray.router:CostRouter",
            request_router_kwargs={"app": settings.app},
            request_routing_stats_period_s=REPORT_S,
            request_routing_stats_timeout_s=HEALTH_TIMEOUT_S,
        ),
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **scale,
    )
    target = serve.RunTarget(deployment.bind(version(), attrs.asdict(setup)), name=settings.app, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)
    return serve.get_app_handle(settings.app)


def wait_for_replica(app: str) -> None:
    """Wait until a replica runs. Raises ClusterError if none can be started."""
    while True:
        state = serve.status().applications.get(app)
        if state is None:
            raise ClusterError(f"the application {app!r} was deleted")
        deployments = list(state.deployments.values())
        if any(one.replica_states.get("RUNNING") for one in deployments):
            return
        if str(getattr(state.status, "value", state.status)) == "DEPLOY_FAILED":
            messages = [one.message for one in deployments if one.message] or [state.message]
            raise ClusterError(f"the replicas cannot be started: {reason_of(messages[0])}")
        time.sleep(_POLL_S)


def troubles(app: str) -> str:
    """Message of the cluster about replicas that cannot be started; "" for none."""
    state = serve.status().applications.get(app)
    if state is None:
        return "the application was deleted"
    healthy = ("HEALTHY", "UPSCALING", "DOWNSCALING", "UPDATING")
    return "; ".join(
        reason_of(one.message)
        for one in state.deployments.values()
        if one.message and str(getattr(one.status, "value", one.status)) not in healthy
    )


def delete(app: str) -> None:
    """End the application and its replicas."""
    with contextlib.suppress(Exception):  # the cluster may be gone already
        serve.delete(app)


def disconnect() -> None:
    """Leave the cluster; one that was started by `connect` ends."""
    ray.shutdown()


def _running_setup(app: str) -> Setup | None:
    """Settings of the application's replicas; None if none of them answers."""
    if app not in serve.status().applications:
        return None
    try:
        answer = serve.get_app_handle(app).describe.remote(Route()).result(timeout_s=ANSWER_S)
    except Exception as error:  # of replicas that are starting, ending, or of another version
        _log.info("the application %r does not answer: %s", app, error)
        return None
    setup: Setup = answer[1]
    return setup
