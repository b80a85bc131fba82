"""Replicas on two Ray nodes: texts, deaths, updates, full queues."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import psutil
import pytest

from http_server import Served, request_json, served, wait_for
from llamacli.errors import InvalidRequestError
from llamacli.hub.demo import demo_path
from llamacli.serve.engine import LocalEngine
from llamacli.serve.models import ModelSource
from llamacli.serve.settings import EngineSettings

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-ray"),
    pytest.mark.filterwarnings("ignore"),  # of Ray's own
]

SOURCE = ModelSource("demo", demo_path(), ("story",))
LIMITS = EngineSettings(n_ctx=512, max_running=8, max_queue=200, threads=1)
LONG = {"prompt": "Once upon a time there was", "max_tokens": 120, "temperature": 0.9, "ignore_eos": True}
START_S = 90
SILENCE_S = 8.0
CPUS = 0.9  # of one for each node: the rest is for a replica that cannot be started
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
READY = re.compile(r"serving demo on http://127\.0\.0\.1:(\d+) ")


@attrs.frozen
class Nodes:
    """Cluster of Ray's on this machine: one head, one more node."""

    cluster: Any
    worker: Any

    @property
    def address(self) -> str:
        return str(self.cluster.address)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex())  # else Ray writes one into the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster  # which reads the variables now

        cluster = Cluster()
        try:
            cluster.add_node(**NODE)
            yield Nodes(cluster, cluster.add_node(**NODE))
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def ray_engine(nodes: Nodes) -> Any:
    from llamacli.serve.ray.engine import RayEngine
    from llamacli.serve.ray.settings import RaySettings

    return RayEngine(SOURCE, LIMITS, RaySettings(address=nodes.address, replicas=(2, 2), cpus=CPUS))


def test_a_model_without_the_head_that_is_asked_for_is_refused(nodes: Nodes) -> None:
    from llamacli.serve.ray.engine import RayEngine
    from llamacli.serve.ray.settings import RaySettings

    with pytest.raises(InvalidRequestError, match="has no multi-token-prediction head"):
        RayEngine(attrs.evolve(SOURCE, draft="mtp"), LIMITS, RaySettings(address=nodes.address))


@pytest.fixture(scope="module")
def ray_server(ray_engine: Any) -> Iterator[Served]:
    """The engine, served; that closes it."""
    ray_engine.load("demo").result(START_S)
    with served(ray_engine, slots=True) as server:
        wait_for(lambda: ray_engine.n_replicas == 2, START_S)
        yield server


@pytest.fixture(scope="module")
def alone() -> Iterator[Served]:
    """The same model and limits in this process."""
    engine = LocalEngine([SOURCE], LIMITS)
    engine.load("demo").result(START_S)
    with served(engine) as server:
        yield server


def completion(server: Served, **fields: Any) -> Any:
    reply = server.send("/v1/completions", {**LONG, **fields})
    assert reply.status == 200, reply.body
    return reply.json


def result(reply: Any) -> Any:
    """Parts of a reply that depend on the request alone."""
    return reply["choices"], reply["usage"]["completion_tokens"], reply["system_fingerprint"]


def streamed(port: int, on_chunk: Callable[[], None] = lambda: None, **fields: Any) -> str:
    """Text of a stream that ends without an error."""
    body = json.dumps({**LONG, "stream": True, **fields})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        text, ended = "", False
        for line in response:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                on_chunk()
        assert ended
        return text


def replicas() -> dict[int, psutil.Process]:
    """Processes of the replicas."""
    return actors("ServeReplica:llamacli")


def actors(name: str) -> dict[int, psutil.Process]:
    """Processes of Ray's actors of a name, without those that end."""
    found = {}
    for process in psutil.process_iter(["cmdline", "status"]):
        if any(name in part for part in process.info["cmdline"] or ()):
            found[process.pid] = process
    return found


def test_texts_are_those_of_one_process(ray_server: Served, alone: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    requests: list[dict[str, Any]] = [
        {"seed": 1, "n": 2, "logprobs": 2},
        {"seed": 2, "prompt": ["One day", "The fox"], "max_tokens": 20},
        {"seed": 3, "response_format": {"type": "json_object", "schema": schema}, "ignore_eos": False},
        {"seed": 4, "echo": True, "logprobs": 1, "max_tokens": 1},
        {"seed": 5, "model": "story", "stop": ["e"]},
    ]
    for fields in requests:
        assert result(completion(ray_server, **fields)) == result(completion(alone, **fields))
    chat = ray_server.chat("Tell me of a fox.", seed=1, max_tokens=30).json
    assert chat["choices"] == alone.chat("Tell me of a fox.", seed=1, max_tokens=30).json["choices"]
    vectors = [server.send("/v1/embeddings", {"input": ["a fox", "a bear"]}).json for server in (ray_server, alone)]
    assert vectors[0]["data"] == vectors[1]["data"]


def test_errors_are_those_of_one_process(ray_server: Served, alone: Served) -> None:
    for body in (
        {"prompt": [1] * 600},
        {"prompt": "a", "model": "other"},
        {"prompt": "a", "n": 9},
        {"prompt": "a", "temperature": -1},
        {"prompt": [5000]},
        {"prompt": "a", "grammar": "root ::= ("},
    ):
        mine, theirs = (server.send("/v1/completions", body) for server in (ray_server, alone))
        assert (mine.status, mine.json) == (theirs.status, theirs.json)
        assert mine.status in (400, 404)


def metric_names(server: Served) -> set[str]:
    lines = server.send("/metrics").body.decode().splitlines()
    return {line.split("{")[0].split(" ")[0] for line in lines if line.startswith("llamacli_")}


def test_metrics_have_the_names_of_one_process(ray_server: Served, alone: Served) -> None:
    completion(ray_server)
    completion(alone)
    wait_for(lambda: "llamacli_finished_total" in metric_names(alone))  # counted after the reply's last event
    names = metric_names(alone)
    assert "llamacli_generation_tokens_total" in names
    wait_for(lambda: metric_names(ray_server) >= names)  # replicas tell their counts now and then
    assert ray_server.send("/health").status == 200


def n_running(server: Served) -> float:
    found = re.search(r"^llamacli_requests_running\S* (\S+)$", server.send("/metrics").body.decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_client_that_leaves_frees_its_place(ray_server: Served) -> None:
    connections = []
    for seed in range(4):
        connection = ray_server.connect()
        body = json.dumps({**LONG, "stream": True, "max_tokens": 480, "seed": seed, "n": 4})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        connections.append((connection, connection.getresponse()))
    for connection, response in connections:
        response.close()
        connection.close()
    wait_for(lambda: n_running(ray_server) == 0, 15)


def many(port: int, alone: Served, disturb: Callable[[], None], n: int = 40) -> None:
    """Stream many requests, disturb in the middle, and compare all texts."""
    chunks, disturbed = 0, threading.Lock()

    def count() -> None:
        nonlocal chunks
        chunks += 1
        if chunks > 5 * n and disturbed.acquire(blocking=False):
            disturb()

    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        running = [pool.submit(streamed, port, count, seed=seed) for seed in range(n)]
        texts = [one.result() for one in running]
    assert disturbed.locked(), "it was over too soon"
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        expected = list(pool.map(lambda seed: completion(alone, seed=seed)["choices"][0]["text"], range(n)))
    assert texts == expected


def test_a_replica_killed_under_many_requests_is_not_seen(ray_server: Served, alone: Served) -> None:
    before = replicas()
    assert len(before) == 2
    many(ray_server.port, alone, next(iter(before.values())).kill)
    wait_for(lambda: len(replicas().keys() - before.keys()) == 1, START_S)


def test_a_node_that_leaves_under_many_requests_is_not_seen(nodes: Nodes, ray_server: Served, alone: Served) -> None:
    many(ray_server.port, alone, lambda: nodes.cluster.remove_node(nodes.worker, allow_graceful=False), 100)
    assert ray_server.send("/health").status == 200
    nodes.cluster.add_node(**NODE)
    wait_for(lambda: len(replicas()) == 2, START_S)


def test_a_replica_that_hangs_is_not_seen(ray_engine: Any, ray_server: Served, alone: Served) -> None:
    wait_for(lambda: len(replicas()) == ray_engine.n_replicas == 2, START_S)
    before, usual = replicas(), ray_engine._caller.silence_s
    ray_engine._caller.silence_s = SILENCE_S
    hung = next(iter(before.values()))
    try:
        many(ray_server.port, alone, hung.suspend)
        started = time.monotonic()
        assert completion(ray_server, max_tokens=2)
        assert time.monotonic() - started < SILENCE_S, "nothing more is sent to it"
    finally:
        ray_engine._caller.silence_s = usual
        hung.kill()
    wait_for(lambda: len(replicas().keys() - {hung.pid}) == 2, START_S)


@contextlib.contextmanager
def program(*options: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Running `llamacli serve --ray`, and its lines up to the greeting."""
    command = [sys.executable, "-m", "llamacli", "serve", f"demo={demo_path()}", "--port", "0", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if READY.search(line):
                    break
            yield process, lines
        finally:
            process.kill()


def test_an_update_loses_no_stream_and_full_queues_are_refused(nodes: Nodes, ray_server: Served, alone: Served) -> None:
    wait_for(lambda: len(replicas()) == 2, START_S)
    before = replicas()
    options = ["--ray", nodes.address, "--ray-replicas", "2", "--ray-cpus", str(CPUS), "--ray-keep", "-c", "512"]
    options += ["--threads", "1", "--max-running", "1", "--max-queue", "1", "--slots"]
    stop, texts = threading.Event(), list[tuple[int, str]]()

    def keep_streaming(first: int) -> None:
        seed = first
        while not stop.is_set():
            texts.append((seed, streamed(ray_server.port, seed=seed)))
            seed += 2

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(keep_streaming, first) for first in range(2)]
        try:
            with program(*options) as (process, lines):
                found = READY.search(lines[-1]) if lines else None
                assert found is not None, "".join(lines)
                wait_for(lambda: len(replicas()) == 2 and not replicas().keys() & before.keys(), START_S)
                stop.set()
                for one in streams:
                    one.result(START_S)
                _expect_refusals(int(found[1]))
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
        finally:
            stop.set()
    assert texts
    for seed, text in texts[:20]:
        assert text == completion(alone, seed=seed)["choices"][0]["text"]


def _expect_refusals(port: int) -> None:
    """Send more requests than two replicas can take."""
    body = {**LONG, "max_tokens": 450}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        started = time.monotonic()
        replies = list(pool.map(lambda seed: request_json(port, "/v1/completions", {**body, "seed": seed}), range(16)))
    statuses = [reply.status for reply in replies]
    assert set(statuses) == {200, 429}, statuses
    assert time.monotonic() - started < START_S
    for reply in replies:
        if reply.status == 429:
            assert reply.json["error"]["code"] == "queue_full"
            assert int(reply.headers["retry-after"]) >= 1


def test_a_killed_worker_of_divided_layers_is_not_seen(nodes: Nodes, alone: Served) -> None:
    """Ray starts another worker, which replays the requests."""
    options = ["--ray", nodes.address, "--split-layers", "--ray-cpus", "0.1", "-c", "512", "--threads", "1"]
    with program(*options, "--max-running", "8") as (process, lines):
        found = READY.search(lines[-1]) if lines else None
        assert found is not None, "".join(lines)
        (worker,) = actors("StageActor").values()
        many(int(found[1]), alone, worker.kill, 8)
        assert actors("StageActor").keys() - {worker.pid}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_for(lambda: not actors("StageActor"), START_S)


def test_replicas_that_cannot_be_started_say_why(nodes: Nodes, ray_server: Served) -> None:
    options = ["--ray", nodes.address, "--ray-app", "small", "--ray-cpus", "0.1", "--kv-memory", "1K"]
    with program(*options) as (process, lines):
        assert process.wait(START_S) == 1
        assert lines[-1].startswith("llamacli: error: the replicas cannot be started: a context of 1024 tokens takes ")
    assert ray_server.send("/health").status == 200


def test_a_cluster_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-m", "llamacli", "serve", "--port", "0", "--ray", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "error: there is no Ray cluster at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
