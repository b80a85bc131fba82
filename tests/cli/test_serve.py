"""The server as a program, with the demo model and OpenAI's client."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import importlib.util
import json
import math
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import click.testing
import openai
import pytest

from http_server import TEMPLATE, HttpReply, request_json, wait_for
from llamacli import load_model
from llamacli.cli.app import app
from llamacli.cli.command import grouped
from llamacli.cli.model_sources import model_sources
from llamacli.cli.numbers import ByteSize
from llamacli.cli.serve import engine_settings, http_settings, serve
from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.hub.demo import demo_path
from llamacli.serve.http.keys import as_keys
from llamacli.serve.http.page import PAGE
from suite import PROFILE

PROMPT = "Once upon a time there was a fox"
HI = [{"role": "user", "content": "Tell me of a small fox."}]
READY = re.compile(r"serving (\S+) on http://127\.0\.0\.1:(\d+) ")
START_S = 60
N_SCHEMAS = 1000 if PROFILE == "long" else 100
N_DISCONNECTS = 1000 if PROFILE == "long" else 200

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins" / "llama"


class Program:
    """Running `llamacli serve`; `lines` are those of stderr so far."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process, self.lines = process, list[str]()
        self._ready = threading.Event()
        self.port = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := READY.search(line):
                self.port = int(found[2])
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        assert self._ready.wait(START_S)
        assert self.port, "".join(self.lines)

    def send(self, path: str, body: object = None, **options) -> HttpReply:
        return request_json(self.port, path, body, **options)

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", **{"api_key": "unused", "max_retries": 0, **options}
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join()
        return code


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Program]]:
    """Start a server with the demo model on a free port."""
    site = tmp_path_factory.mktemp("site")
    info = site / "llamacli_llama-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llamacli-llama\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[llamacli.architectures]\nllama = llamacli_llama\n")
    template = site / "template.jinja"
    template.write_text(TEMPLATE + "{# Calls are between <tool_call> and </tool_call>. #}")
    path = os.pathsep.join(map(str, [site, ROOT / "core", PLUGIN]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    with contextlib.ExitStack() as stack:

        def begin(*options: str, **variables: str) -> Program:
            command = [sys.executable, "-m", "llamacli", "serve", "--port", "0"]
            command += ["--chat-template-file", str(template), *options]
            process = subprocess.Popen(command, env=environment | variables, stderr=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            program = Program(process)
            program.wait_ready()
            return program

        yield begin


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Program]) -> Iterator[Program]:
    """A server for several tests; it ends in order."""
    program = start_server("--alias", "story, tale", "--tags", "small, stories", "--slots", "--max-running", "4")
    info = program.send("/v1/models").json["data"][0]
    assert (info["aliases"], info["tags"]) == (["story", "tale"], ["small", "stories"])
    yield program
    assert program.end() == 0, "".join(program.lines)


def test_texts_are_those_of_run(server: Program) -> None:
    with server.client() as client:
        served = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text
    with load_model(demo_path()) as model, model.create_session() as session:
        tokens = session.generate(model.tokenizer.encode_prompt(PROMPT), max_tokens=24)
        assert served == "".join(token.piece for token in tokens)


def test_same_bytes_alone_and_under_load(server: Program) -> None:
    def text(seed: int, stream: bool = False) -> str:
        with server.client() as client:
            options = {"model": "story", "messages": HI, "max_tokens": 24, "seed": seed, "temperature": 1.0}
            if not stream:
                return client.chat.completions.create(**options).choices[0].message.content
            return "".join(
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **options)
            )

    alone = [text(seed) for seed in range(6)]
    assert len(set(alone)) > 1
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        loaded = list(pool.map(text, [*range(6), *range(6)], [False] * 6 + [True] * 6))
    assert loaded == alone * 2


def test_choice_0_is_that_of_one_choice(server: Program) -> None:
    with server.client() as client:
        options = {"model": "demo", "messages": HI, "max_tokens": 16, "seed": 5, "temperature": 1.0}
        one = client.chat.completions.create(**options).choices[0].message.content
        several = [choice.message.content for choice in client.chat.completions.create(n=3, **options).choices]
    assert several[0] == one
    assert len(set(several)) > 1


def test_scores_as_lm_eval_reads_them(server: Program) -> None:
    with load_model(demo_path()) as model, model.create_session() as session:
        ids = model.tokenizer.encode_prompt(PROMPT)
        logits = session.eval(ids, all_logits=True)
        expected = [
            float(row[token] - row.max() - math.log(sum(map(math.exp, row - row.max()))))
            for row, token in zip(logits[:-1], ids[1:], strict=True)
        ]
    body = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    logprobs = server.send("/v1/completions", body).json["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
    body["max_tokens"] = 0
    choice = server.send("/v1/completions", body).json["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:-1]
    assert choice["text"] == PROMPT


def test_logprobs_join_to_the_text(server: Program) -> None:
    with server.client() as client:
        choice = client.chat.completions.create(
            model="demo", messages=HI, max_tokens=12, logprobs=True, top_logprobs=2, seed=1
        ).choices[0]
    joined = bytes(byte for token in choice.logprobs.content for byte in token.bytes).decode()
    assert joined == choice.message.content
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_json_schema(server: Program) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"fox": {"enum": ["red", "grey"]}}, "required": ["fox"],
              "additionalProperties": False}  # fmt: skip
    with server.client() as client:
        reply = client.chat.completions.create(
            model="demo", messages=HI, max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )  # fmt: skip
    assert json.loads(reply.choices[0].message.content)["fox"] in ("red", "grey")
    assert reply.choices[0].finish_reason == "stop"


def test_required_tool_calls(server: Program) -> None:
    pytest.importorskip("llguidance")
    parameters = {"type": "object", "properties": {"animal": {"enum": ["fox", "owl"]}}, "required": ["animal"],
                  "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("find", "feed")]
    with server.client() as client:
        for choice in ("required", {"type": "function", "function": {"name": "feed"}}):
            options = {"model": "demo", "messages": HI, "max_tokens": 200, "seed": 1, "parallel_tool_calls": False}
            reply = client.chat.completions.create(**options, tools=tools, tool_choice=choice).choices[0]
            (call,) = reply.message.tool_calls
            assert reply.finish_reason == "tool_calls"
            assert call.function.name in (("find", "feed") if choice == "required" else ("feed",))
            assert json.loads(call.function.arguments)["animal"] in ("fox", "owl")


def test_prompts_are_cached(server: Program) -> None:
    text = "There was a fox, and the fox had a friend. " * 8
    with server.client() as client:
        used = [
            client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": text + more}], max_tokens=2
            ).usage
            for more in ("One.", "Two.")
        ]
    assert used[1].prompt_tokens_details.cached_tokens > 50
    assert used[1].prompt_tokens >= used[1].prompt_tokens_details.cached_tokens


def test_stop_strings(server: Program) -> None:
    with server.client() as client:
        full = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0).choices[0]
        word = full.text.split()[4]
        cut = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0, stop=word).choices[0]
    assert cut.text == full.text[: full.text.index(word)]
    assert cut.finish_reason == "stop"


def test_context_overflow(server: Program) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="demo", prompt=[5] * 1100)
    assert error.value.code == "context_length_exceeded"
    assert error.value.body["n_ctx"] == 1024


def test_invalid_samplers_are_client_errors(server: Program) -> None:
    assert server.send("/v1/completions", {"prompt": "x", "samplers": ["magic"]}).status == 400


def test_embeddings(server: Program) -> None:
    with server.client() as client:
        vectors = client.embeddings.create(model="demo", input=["a fox", "a fox", "the moon"]).data
    assert vectors[0].embedding == vectors[1].embedding != vectors[2].embedding
    assert sum(x * x for x in vectors[0].embedding) == pytest.approx(1, abs=1e-5)


def test_many_embeddings_in_one_request(server: Program) -> None:
    with server.client() as client:
        vectors = client.embeddings.create(model="demo", input=[[5, 6, 7 + i % 2] for i in range(100)]).data
    assert [vector.index for vector in vectors] == [*range(100)]
    assert vectors[0].embedding == vectors[98].embedding != vectors[99].embedding


def test_documented_client(server: Program, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    code = next(code for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "stream" in code)
    assert 'base_url="http://127.0.0.1:8080/v1"' in code
    code = code.replace(":8080", f":{server.port}").replace('model="model"', 'model="demo", max_tokens=4')
    names: dict = {}
    exec(code, names)
    names["stream"].close()
    names["client"].close()
    assert capsys.readouterr().out


def test_disconnects_leave_nothing_behind(server: Program) -> None:
    with server.client() as client:
        for _ in range(4):
            stream = client.chat.completions.create(
                model="demo", messages=HI, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            stream.close()
    wait_for(lambda: not any(slot["is_processing"] for slot in server.send("/slots").json))
    assert 'llamacli_cancelled_total{model="demo",phase="decode"}' in server.send("/metrics").body.decode()


def test_log_names_requests_without_texts(server: Program) -> None:
    server.send(
        "/v1/completions", {"prompt": "a very private text", "max_tokens": 1}, headers={"X-Request-Id": "abc-1"}
    )
    wait_for(lambda: any("id=abc-1" in line for line in server.lines))
    assert "private" not in "".join(server.lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_draining(number: int, start_server: Callable[..., Program]) -> None:
    """Signals let running requests end, or cut them with an error."""
    limits = "-t", "1", "--shutdown-timeout", "0.3"
    program = start_server(*limits, "--api-key", "secret", LLAMACLI_SERVE_MAX_TOKENS="900")
    assert program.send("/v1/models").status == 401
    client = program.client(api_key="secret")
    short = client.chat.completions.create(model="demo", messages=HI, max_tokens=2, stream=True)
    much: Any = {"n": 8, "logprobs": True, "top_logprobs": 20, "extra_body": {"ignore_eos": True}}
    long = client.chat.completions.create(model="demo", messages=HI, stream=True, **much)
    next(iter(long))
    program.process.send_signal(number)
    list(short)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(long)
    client.close()
    assert program.process.wait(60) == 0, "".join(program.lines)  # a second signal may come when it no longer listens


@pytest.mark.slow
def test_without_free_descriptors_connections_wait(start_server: Callable[..., Program]) -> None:
    program = start_server("--read-timeout", "3")
    n_open = len(os.listdir(f"/proc/{program.process.pid}/fd"))
    resource.prlimit(program.process.pid, resource.RLIMIT_NOFILE, (n_open + 8, n_open + 8))
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", program.port)))
        wait_for(lambda: any(" error: " in line for line in program.lines))
        time.sleep(2.5)
    (reported,) = [line for line in program.lines if " error: " in line]
    assert "Traceback" not in "".join(program.lines)
    assert "no connection can be accepted: Too many open files (see ulimit -n)" in reported
    assert program.send("/health").status == 200


@pytest.mark.slow
def test_killed_server_leaves_nothing(start_server: Callable[..., Program]) -> None:
    program = start_server()
    assert program.end(signal.SIGKILL) == -signal.SIGKILL
    again = start_server("--port", str(program.port))
    assert again.send("/health").status == 200
    assert again.end(signal.SIGINT) == 0


@pytest.mark.slow
def test_preempted_requests_end_with_the_same_bytes(start_server: Callable[..., Program]) -> None:
    """Eight long texts with memory for about two."""
    options = {"max_tokens": 380, "ignore_eos": True, "temperature": 1.0}

    def texts(program: Program, n_threads: int) -> list[str]:
        def text(seed: int) -> str:
            body = {"prompt": f"Story {seed}: once upon a time", "seed": seed, **options}
            return program.send("/v1/completions", body).json["choices"][0]["text"]

        with concurrent.futures.ThreadPoolExecutor(n_threads) as pool:
            return list(pool.map(text, range(8)))

    program = start_server("--kv-memory", "2M")
    together = texts(program, 8)
    metrics = program.send("/metrics").body.decode()
    alone = texts(program, 1)
    assert together == alone
    assert len(set(alone)) == 8
    assert float(re.search(r"^llamacli_preemptions_total\{.*\} (\S+)", metrics, re.M)[1]) > 0
    assert program.end() == 0


@pytest.mark.slow
def test_random_disconnects_lose_and_mix_nothing(start_server: Callable[..., Program]) -> None:
    """Each reply is forced by a grammar to carry its own number."""
    pytest.importorskip("llguidance")
    program = start_server("--max-running", "4")

    def one(number: int) -> bool:
        draw = random.Random(number)
        wanted = f"[{number}]" + f"{number:05d}" * 8
        body = {"messages": HI, "grammar": f'root ::= "{wanted}"', "stream": draw.random() < 0.5, "max_tokens": 300}
        data = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", program.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
            if draw.random() < 0.5:
                time.sleep(draw.random() * 0.2)
                return False
            with connection.getresponse() as response:
                reply = HttpReply(response.status, {}, response.read())
        assert reply.status == 200, reply.body
        if body["stream"]:
            text = "".join(
                choice["delta"].get("content") or "" for event in reply.events for choice in event["choices"]
            )
        else:
            text = reply.json["choices"][0]["message"]["content"]
        assert text == wanted
        return True

    def pages() -> list[str]:
        return re.findall(
            r"^llamacli_kv_pages_(?:used|cached)\{.*\} (\S+)", program.send("/metrics").body.decode(), re.M
        )

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        whole = list(pool.map(one, range(N_DISCONNECTS)))
    assert 0.25 < sum(whole) / N_DISCONNECTS < 0.75
    wait_for(lambda: len(set(pages())) == 1)  # all pages in use are those of kept prefixes
    assert program.end() == 0


@pytest.mark.slow
def test_replies_are_valid_by_their_schemas(start_server: Callable[..., Program]) -> None:
    pytest.importorskip("llguidance")
    program = start_server("--max-running", "8")

    def one(number: int) -> None:
        draw = random.Random(number)
        names = draw.sample(["fox", "owl", "hare", "mole", "toad"], 3)
        kinds: list[dict] = [{"enum": names}, {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]
        draw.shuffle(kinds)
        schema = {"type": "object", "properties": dict(zip(names, kinds, strict=True)), "required": names,
                  "additionalProperties": False}  # fmt: skip
        reply = program.send("/v1/chat/completions", {"messages": HI, "json_schema": schema, "seed": number}).json
        value = json.loads(reply["choices"][0]["message"]["content"])
        assert value.keys() == set(names)
        for name, kind in schema["properties"].items():
            assert value[name] in kind.get("enum", [*range(10)] if kind.get("type") == "integer" else [True, False])

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(N_SCHEMAS)))
    assert program.end() == 0


@pytest.mark.slow
def test_overload_is_refused_and_the_rest_is_served(start_server: Callable[..., Program]) -> None:
    program = start_server("--max-running", "2", "--max-queue", "2")

    def one(number: int) -> HttpReply:
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "seed": number, "stream": number % 2 == 0}
        return program.send("/v1/completions", body)

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        replies = list(pool.map(one, range(24)))
    refused = [reply for reply in replies if reply.status == 429]
    assert {reply.status for reply in replies} == {200, 429}
    assert len(replies) - len(refused) >= 4
    for reply in refused:
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert reply.json["error"]["code"] == "queue_full"
    assert not any("x-test-incomplete" in reply.headers for reply in replies)
    metrics = program.send("/metrics").body.decode()
    assert float(re.search(r'^llamacli_refused_total\{code="queue_full".*\} (\S+)', metrics, re.M)[1]) == len(refused)
    assert program.end() == 0


@pytest.mark.slow
def test_models_are_loaded_on_demand(start_server: Callable[..., Program]) -> None:
    program = start_server(f"one={demo_path()}", f"two={demo_path()}", "--models-max", "1")

    def loaded() -> list[str]:
        return [model["id"] for model in program.send("/v1/models").json["data"] if model["meta"]["loaded"]]

    assert loaded() == ["one"]
    assert [program.send(f"/props?model={name}").json["model_alias"] for name in ("two", "one")] == ["two", "one"]
    texts = {
        program.send("/v1/completions", {"model": name, "prompt": PROMPT, "temperature": 0}).json["choices"][0]["text"]
        for name in ("one", "two", "one", "two")
    }
    assert len(texts) == 1
    assert loaded() == ["two"]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:  # who asks for a model gets it, however often others do
        bodies = [{"model": name, "prompt": PROMPT, "max_tokens": 2} for name in ("one", "two") * 6]
        replies = list(pool.map(lambda body: program.send("/v1/completions", body), bodies))
    assert [reply.status for reply in replies] == [200] * 12
    name = loaded()[0]
    assert program.send("/api/generate", {"model": name, "keep_alive": 0}).json["done_reason"] == "unload"
    wait_for(lambda: not loaded())
    assert program.end() == 0


# --- options


def test_wrong_models_end_the_program(start_server, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    command = [sys.executable, "-m", "llamacli", "serve", str(broken), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "core")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_wrong_chat_template_ends_the_program(program) -> None:
    done = program("serve", "--chat-template", "nonsense", "--port", "0")
    assert done.returncode == 1
    assert "chat template 'nonsense' is not one of bailing" in done.stderr
    assert "serving" not in done.stderr


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("1", 1), ("10M", 10 << 20), ("1.5G", 3 << 29), ("2GiB", 2 << 30), ("7 kB", None), ("0", None), ("x", None)],
)
def test_sizes(text: str, n_bytes: int | None) -> None:
    if n_bytes is None:
        with pytest.raises(click.BadParameter):
            ByteSize().convert(text, None, None)
    else:
        assert ByteSize().convert(text, None, None) == n_bytes


def given(*arguments: str) -> dict:
    with serve.make_context("serve", list(arguments)) as context:
        return context.params


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    result = click.testing.CliRunner().invoke(app, ["serve"], prog_name="llamacli")
    assert result.exit_code == 1
    assert "serve needs uvicorn: pip install llamacli\n" in result.stderr


@pytest.mark.parametrize(
    ("text", "replicas"), [("2", (2, 2)), ("1:8", (1, 8)), ("0", None), ("3:2", None), ("1:", None), ("x", None)]
)
def test_numbers_of_replicas(text: str, replicas: tuple[int, int] | None) -> None:
    if replicas is None:
        with pytest.raises(click.UsageError, match="is not a number of replicas such as 2, or 1:8"):
            given("--ray-replicas", text)
    else:
        assert given("--ray-replicas", text)["ray_replicas"] == replicas


def test_addresses_of_clusters() -> None:
    assert given()["ray_address"] is None
    assert given("--ray")["ray_address"] == given("a.gguf", "--ray", "--port", "0")["ray_address"] == "auto"
    assert given("--ray", "head:6379", "a.gguf")["ray_address"] == "head:6379"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray", "a.gguf"], "'--ray': 'a.gguf' is not auto, local, or the HOST:PORT"),
        (["--ray=auto", f"a={demo_path()}", f"b={demo_path()}"], "--ray serves one model"),
        (["--ray=auto", "--draft", str(demo_path())], "--ray has no draft models; --lookup and --draft mtp draft"),
    ],
)
def test_wrong_clusters(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "llamacli.serve.ray.engine", types.SimpleNamespace(RayEngine=None))
    result = click.testing.CliRunner().invoke(app, ["serve", "--port", "0", *arguments], prog_name="llamacli")
    assert result.exit_code != 0
    assert message in result.stderr


@pytest.mark.medium
def test_ray_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    result = click.testing.CliRunner().invoke(app, ["serve", "--port", "0", "--ray"], prog_name="llamacli")
    assert result.exit_code == 1
    assert "serve --ray needs ray: pip install 'llamacli[ray]'" in result.stderr


def test_names_of_models(tmp_path: Path) -> None:
    for name in ("a.gguf", "b=c.gguf"):
        (tmp_path / name).write_bytes(b"")
    sources = model_sources(
        [str(tmp_path / "a.gguf"), f"x={tmp_path / 'a.gguf'}", str(tmp_path / "b=c.gguf")], ["alias"]
    )
    assert [(source.name, source.aliases) for source in sources] == [("a", ("alias",)), ("x", ()), ("b=c", ())]
    assert model_sources([], [])[0].name == "demo"
    with pytest.raises(click.UsageError, match="Two models are called 'a'"):
        model_sources([str(tmp_path / "a.gguf")] * 2, [])


def test_short_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    names = tmp_path / "llamacli" / "aliases.toml"
    names.parent.mkdir()
    names.write_text(f'"mine:1b" = "{file}"\n')
    sources = model_sources(["mine:1b", "other=mine:1b"], [])
    assert [(source.name, source.path) for source in sources] == [("mine:1b", file), ("other", file)]
    with pytest.raises(ModelFormatError, match="nobody's: no such file, and no short name of a model"):
        model_sources(["nobody's"], [])


def test_options_are_grouped() -> None:
    groups = grouped(serve.params)
    assert list(groups) == [
        "Models", "Context and requests", "Stored work", "Speculative decoding", "Sampling by default", "Network",
        "Monitoring", "Ray cluster", "Model metadata", "Computing", "Several machines", "Other",
    ]  # fmt: skip
    assert [option.name for option in groups["Other"]] == ["verbose", "debug"]


def test_drafts(tmp_path: Path) -> None:
    limits = engine_settings(given("--lookup", "--draft-max", "5"))
    assert (limits.lookup, limits.draft_max) == (True, 5)
    assert not engine_settings(given()).lookup
    file = tmp_path / "small.gguf"
    file.write_bytes(b"")
    sources = model_sources([f"a={demo_path()}", f"b={demo_path()}"], [], (), file)
    assert [source.draft for source in sources] == [file, None]
    with pytest.raises(ModelFormatError, match=r"none\.gguf: no such file"):
        model_sources([], [], (), tmp_path / "none.gguf")
    result = click.testing.CliRunner().invoke(app, ["serve", "--lookup", "-md", str(file)], prog_name="llamacli")
    assert result.exit_code == 2
    assert "--lookup and --draft exclude each other" in result.stderr


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\none\n\ntwo name=ann streams=2 # laptop\n")
    http = http_settings(given("--api-key", "zero", "--api-key-file", str(file)))
    assert (http.api_keys, http.api_key_file) == (as_keys(["zero"]), file)
    with pytest.raises(InvalidRequestError, match="line 2: this key is there already"):
        http_settings(given("--api-key", "one", "--api-key-file", str(file)))
    with pytest.raises(click.UsageError, match="a key is there twice"):
        http_settings(given("--api-key", "one", "--api-key", "one"))
    with pytest.raises(click.UsageError):
        http_settings(given("--api-key", ""))
    with pytest.raises(click.UsageError):
        http_settings(given("--chat-template", "x", "--chat-template-file", "y"))
    with pytest.raises(click.UsageError, match="--max-tokens 0 leaves no reply"):
        http_settings(given("-n", "0"))
    assert http_settings(given("-n", "-1")).max_tokens == -1


def test_page(server: Program) -> None:
    """The page is served unless it is turned off."""
    assert server.send("/").headers["content-type"].startswith("text/html")
    assert f"page to chat on: http://127.0.0.1:{server.port}/\n" in "".join(server.lines)
    assert http_settings(given()).page == PAGE
    assert http_settings(given("--no-page")).page is None


def test_sampling_parameters_of_the_server() -> None:
    http = http_settings(given("--temp", "0", "--seed", "7", "--min-p", "0.1", "--strict"))
    assert (http.sampling, http.seed, http.strict) == ({"temperature": 0.0, "min_p": 0.1}, 7, True)
    assert (http_settings(given()).sampling, http_settings(given("--seed", "-1")).seed) == ({}, None)


def test_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "HOST": "::1", "PORT": "9", "API_KEYS": "one two", "MAX_RUNNING": "3", "KV_MEMORY": "1M", "STEP_MS": "20",
        "MAX_TOKENS": "7", "CORS_ORIGINS": "https://a.example https://b.example", "SLOTS": "1", "CTX_SIZE": "64",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(f"LLAMACLI_SERVE_{name}", value)
    with serve.make_context("serve", [], auto_envvar_prefix="LLAMACLI_SERVE") as context:
        http, limits = http_settings(context.params), engine_settings(context.params)
    assert (http.hosts, http.port, http.api_keys, http.slots) == (("::1",), 9, as_keys(("one", "two")), True)
    assert http.cors_origins == ("https://a.example", "https://b.example")
    assert (limits.max_running, limits.kv_memory, limits.step_ms, http.max_tokens) == (3, 1 << 20, 20.0, 7)
    assert limits.n_ctx == 64
