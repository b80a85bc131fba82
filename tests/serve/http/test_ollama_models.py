"""Catalogue over ollama's API: pull, create, copy, delete, blobs."""

import contextlib
import hashlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import hub_server
from http_server import Served, wait_for
from llamacli.gguf import open_gguf
from llamacli.hub.demo import demo_path
from llamacli.serve.catalogue import Catalogue
from llamacli.serve.http import ollama_models
from llamacli.serve.requests import Preset

NAME = "user/repo:Q8_0"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.HubServer]:
    constants = pytest.importorskip("huggingface_hub.constants")
    data = demo_path().read_bytes()
    with hub_server.serving(
        {"user/repo": {"m-Q8_0.gguf": data, "README.md": b"x"}, "bad/one": {"m.gguf": b"x"}}
    ) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other"))
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path / "catalogue")


@pytest.fixture
def server(serve, catalogue: Catalogue) -> Served:
    return serve(catalogue=catalogue.folder)


@contextlib.contextmanager
def file_limit(n_bytes: int) -> Iterator[None]:
    """Limit the files of this process, as a full disk does."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def lines(reply) -> list[dict[str, Any]]:
    return [json.loads(line) for line in reply.body.splitlines()]


def add_blob(server: Served, data: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    reply = server.send(f"/api/blobs/{digest}", data, {"content-type": "application/octet-stream"})
    assert reply.status == 201
    return digest


def test_without_a_catalogue_nothing_changes(http) -> None:
    for path, method in (("pull", "POST"), ("create", "POST"), ("delete", "DELETE")):
        assert http.send(f"/api/{path}", {"model": "a"}, method=method).status == 501
    assert http.send("/api/copy", {"source": "a", "destination": "b"}).status == 501


class TestPull:
    def test_a_model_is_pulled_with_its_progress(self, server, hub, fake, catalogue) -> None:
        found = lines(server.send("/api/pull", {"model": NAME}))
        assert found[0] == {"status": "pulling manifest"}
        assert found[-1] == {"status": "success"}
        totals = [one for one in found if "total" in one]
        assert {(one["status"], one["digest"]) for one in totals} == {("pulling m-Q8_0.gguf", "m-Q8_0.gguf")}
        assert totals[-1]["completed"] == totals[-1]["total"] == demo_path().stat().st_size
        assert fake.added[NAME].path.read_bytes() == demo_path().read_bytes()
        assert fake.added[NAME].path.is_relative_to(catalogue.folder)
        n = len(hub.requests)
        assert server.send("/api/pull", {"name": NAME, "stream": False}).json == {"status": "success"}
        assert not [one for one in hub.requests[n:] if one.endswith(".gguf") and "resolve" not in one]
        assert server.send("/api/delete", {"model": NAME}, method="DELETE").status == 200
        assert not [path for path in catalogue.hub.rglob("*") if path.is_file() and path.stat().st_size > 1000]
        assert catalogue.names() == []

    @pytest.mark.parametrize(
        ("name", "message"),
        [("user/none", "no such repository"), ("user/repo:Q2_K", "no matching file"), ("nothing-known", "not a model"),
         ("bad/one", "bad/one|not a GGUF|magic|GGUF")],
    )  # fmt: skip
    def test_what_cannot_be_pulled(self, name: str, message: str, server, hub, fake, catalogue) -> None:
        *_, last = lines(server.send("/api/pull", {"model": name}))
        assert [part for part in message.split("|") if part in last["error"]]
        assert server.send("/api/pull", {"model": name, "stream": False}).status == 400
        assert (catalogue.names(), fake.added) == ([], {})

    def test_a_full_disk_and_a_cut_download_leave_no_model(self, server, hub, fake, catalogue) -> None:
        with file_limit(1 << 20):
            *_, last = lines(server.send("/api/pull", {"model": NAME}))
            assert last == {"error": "the catalogue cannot be written: File too large"}
            assert server.send("/api/pull", {"model": NAME, "stream": False}).status == 507
        data = hub.repos["user/repo"]["m-Q8_0.gguf"]
        hub.repos["user/repo"]["m-Q8_0.gguf"] = data[: len(data) // 2]
        assert "error" in lines(server.send("/api/pull", {"model": NAME}))[-1]
        assert (catalogue.names(), fake.added) == ([], {})
        hub.repos["user/repo"]["m-Q8_0.gguf"] = data
        assert lines(server.send("/api/pull", {"model": NAME}))[-1] == {"status": "success"}

    def test_two_at_once_and_a_client_that_leaves(self, server, hub, fake, catalogue, monkeypatch) -> None:
        """A second pull joins the first, or goes on with it."""
        began, ended, fetch = threading.Event(), threading.Event(), ollama_models.fetch

        def endless(reference: Any, folder: Path, progress: Any) -> Any:
            if began.is_set():
                return fetch(reference, folder, progress)
            began.set()
            try:
                while not ended.wait(0.01):
                    progress("m", 1, 2)
            finally:
                ended.set()

        monkeypatch.setattr(ollama_models, "fetch", endless)
        connection = server.connect()
        connection.request("POST", "/api/pull", json.dumps({"model": NAME}), {"content-type": "application/json"})
        assert began.wait(30)
        digest = add_blob(server, demo_path().read_bytes())
        other = server.send("/api/create", {"model": NAME, "files": {"m.gguf": digest}, "stream": False})
        assert (other.status, "is being changed by another request" in other.json["error"]) == (400, True)
        second = server.connect()
        second.request("POST", "/api/pull", json.dumps({"model": NAME}), {"content-type": "application/json"})
        reply = second.getresponse()
        assert json.loads(reply.readline()) == {"status": "waiting for another pull of it"}
        assert (catalogue.names(), fake.added) == ([], {})
        connection.close()
        assert ended.wait(30)
        assert json.loads(reply.read().splitlines()[-1]) == {"status": "success"}
        second.close()
        assert catalogue.names() == [NAME]

    def test_a_pull_whose_client_leaves_changes_nothing(self, server, hub, fake, catalogue, monkeypatch) -> None:
        began, ended = threading.Event(), threading.Event()

        def endless(reference: Any, folder: Path, progress: Any) -> Any:
            began.set()
            try:
                while not ended.wait(0.01):
                    progress("m", 1, 2)
            finally:
                ended.set()

        monkeypatch.setattr(ollama_models, "fetch", endless)
        connection = server.connect()
        connection.request("POST", "/api/pull", json.dumps({"model": NAME}), {"content-type": "application/json"})
        assert began.wait(30)
        connection.close()
        assert ended.wait(30)
        assert (catalogue.names(), fake.added) == ([], {})


class TestCreate:
    def test_defaults_over_another_model(self, server, fake, catalogue) -> None:
        digest = add_blob(server, demo_path().read_bytes())
        parameters = {"temperature": 0.25, "top_k": 5, "stop": ["x"], "seed": 3, "num_predict": 7}
        body = {"model": "a", "files": {"m.gguf": digest}, "system": "Be brief.", "parameters": parameters}
        found = lines(server.send("/api/create", body))
        assert [one["status"] for one in found] == ["writing manifest", "success"]
        preset = fake.added["a"].preset
        sampling = {"temperature": 0.25, "top_k": 5}
        assert preset == Preset(system="Be brief.", sampling=sampling, stop=("x",), seed=3, max_tokens=7)
        body = {"model": "b", "from": "missing"}
        assert server.send("/api/create", body).status == 404
        text = f"FROM @{digest}\n" + 'PARAMETER temperature 1\nTEMPLATE """{{ messages }}"""'
        assert lines(server.send("/api/create", {"name": "c", "modelfile": text}))[-1] == {"status": "success"}
        assert (fake.added["c"].preset.template, fake.added["c"].preset.sampling) == (
            "{{ messages }}",
            {"temperature": 1},
        )
        assert lines(server.send("/api/create", {"model": "d", "from": "a", "system": "", "stream": True}))
        assert fake.added["d"].preset == attrs.evolve(preset, system="")
        assert fake.added["d"].path == fake.added["a"].path

    def test_another_type(self, server, fake, tiny_gguf) -> None:
        digest = add_blob(server, tiny_gguf("gqa").read_bytes())
        body = {"model": "a", "files": {"m.gguf": digest}, "quantize": "q8_0"}
        assert lines(server.send("/api/create", body))[-1] == {"status": "success"}
        with open_gguf(fake.added["a"].path) as file:
            assert file.tensors["blk.0.attn_q.weight"].type.name == "Q8_0"
        assert server.send(f"/api/blobs/{digest}", method="HEAD").status == 404  # no model has it
        again = server.send("/api/create", {"model": "b", "from": "a", "quantize": "q4_0", "stream": False})
        assert (again.status, "quantized already" in again.json["error"]) == (400, True)
        wrong = server.send("/api/create", {"model": "b", "from": "a", "quantize": "q99", "stream": False})
        assert wrong.status == 400
        assert "b" not in fake.added

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "from: give the name of a model, or files"),
            ({"modelfile": "SYSTEM x"}, "modelfile: it has no FROM"),
            ({"modelfile": "FROM /etc/passwd"}, "is not a name of a model"),
            ({"modelfile": "FROM ../x"}, "is not a name of a model"),
            ({"from": "../x"}, "is not a name of a model"),
            ({"files": {"a": "sha256:x"}}, "is not a digest"),
            ({"files": {"a": "sha256:" + "0" * 64}}, "there is no blob"),
            ({"from": "demo", "adapters": {"a": "../x"}}, "is not a digest"),
            ({"from": "demo", "parameters": {"temperature": "hot"}}, "parameters.temperature"),
            ({"from": "demo", "parameters": {"heat": 1}}, "parameters.heat"),
            ({"from": "demo", "parameters": {"num_ctx": 9}}, "parameters.num_ctx: the server's options decide"),
            ({"from": "demo", "template": "{{ .Prompt }}"}, "template: it is one of Go"),
            ({"from": "demo", "template": "{% if %}"}, "template: line 1"),
            ({"from": "demo", "messages": [{}]}, "messages: it is not supported"),
        ],
    )
    def test_refused(self, fields: dict, message: str, server, fake, catalogue) -> None:
        reply = server.send("/api/create", {"model": "a", "stream": False, **fields})
        assert (reply.status, message in reply.json["error"]) == (400, True), reply.json
        assert (catalogue.names(), fake.added) == ([], {})

    def test_files_that_are_no_models(self, server, catalogue) -> None:
        digest = add_blob(server, b"GGUF nonsense")
        *_, last = lines(server.send("/api/create", {"model": "a", "files": {"m": digest}}))
        assert "error" in last
        assert catalogue.names() == []

    def test_names_of_the_start_are_taken(self, server) -> None:
        digest = add_blob(server, demo_path().read_bytes())
        reply = server.send("/api/create", {"model": "demo", "files": {"m": digest}, "stream": False})
        assert (reply.status, "was named when the server was started" in reply.json["error"]) == (400, True)


class TestNames:
    @pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a\0b", "..", ""])
    def test_paths_are_refused_everywhere(self, name: str, server, fake, catalogue) -> None:
        for path, body, method in (
            ("pull", {"model": name}, "POST"),
            ("create", {"model": name, "from": "demo"}, "POST"),
            ("delete", {"model": name}, "DELETE"),
            ("copy", {"source": name, "destination": "a"}, "POST"),
            ("copy", {"source": "a", "destination": name}, "POST"),
        ):
            assert server.send(f"/api/{path}", body, method=method).status == 400
        assert (catalogue.names(), fake.added) == ([], {})

    def test_copy_and_delete(self, server, fake, catalogue) -> None:
        digest = add_blob(server, demo_path().read_bytes())
        server.send("/api/create", {"model": "a", "files": {"m": digest}})
        assert server.send("/api/copy", {"source": "a", "destination": "b:small"}).status == 200
        assert fake.added["b:small"].path == fake.added["a"].path
        assert server.send("/api/delete", {"name": "a"}, method="DELETE").status == 200
        assert fake.added.keys() == {"b:small"} == set(catalogue.names())
        assert fake.added["b:small"].path.is_file()
        for path, body, method in (
            ("copy", {"source": "a", "destination": "c"}, "POST"),
            ("delete", {"model": "a"}, "DELETE"),
            ("delete", {"model": "demo"}, "DELETE"),
        ):
            assert server.send(f"/api/{path}", body, method=method).status == 404

    def test_push_is_refused(self, server) -> None:
        assert server.send("/api/push", {"model": "a"}).status == 501


class TestBlobs:
    def test_head_tells_what_is_there(self, server) -> None:
        digest = add_blob(server, b"data" * 100_000)
        assert server.send(f"/api/blobs/{digest}", method="HEAD").status == 200
        assert server.send(f"/api/blobs/sha256:{'0' * 64}", method="HEAD").status == 404

    def test_other_contents_and_types_are_refused(self, server, catalogue) -> None:
        path = f"/api/blobs/sha256:{'0' * 64}"
        assert server.send(path, b"data", {"content-type": "application/octet-stream"}).status == 400
        assert server.send(path, b"data", {"content-type": "application/json"}).status == 400
        assert server.send(path, b"data", {"content-type": "text/plain"}).status == 415
        origin = {"content-type": "", "origin": "http://127.0.0.1"}
        assert server.send(path, b"data", origin).status == 415
        assert server.send("/api/blobs/sha256:..%2Fx", b"x", {"content-type": "application/octet-stream"}).status in (
            400,
            404,
        )
        assert not list((catalogue.folder / "blobs").iterdir())

    def test_a_client_that_leaves_leaves_nothing(self, server, catalogue) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.putrequest("POST", f"/api/blobs/sha256:{'0' * 64}")
        connection.putheader("content-length", "1000")
        connection.endheaders(b"x" * 10)
        blobs = catalogue.folder / "blobs"
        wait_for(lambda: list(blobs.iterdir()))
        connection.close()
        wait_for(lambda: not list(blobs.iterdir()))


def test_presets_are_defaults_of_requests(serve, fake, monkeypatch) -> None:
    infos = fake.models()
    template = "{% for message in messages %}{{ message.role }}:{{ message.content }}|{% endfor %}"
    preset = Preset("Be brief.", template, {"top_k": 5}, ("x",), 3, 7)
    monkeypatch.setattr(fake, "models", lambda: (attrs.evolve(infos[0], preset=preset),), raising=False)
    http = serve(sampling={"top_k": 9, "top_p": 0.5})
    http.send("/api/chat", {"model": "demo", "messages": HI})
    request = fake.requests[-1]
    assert (request.params.top_k, request.params.top_p, request.stop) == (5, 0.5, ("x",))
    assert (request.seed, request.max_tokens) == (3, 7)
    assert "system:Be brief.|user:hi|" in fake._model.tokenizer.decode(request.prompts[0])
    http.send(
        "/v1/chat/completions", {"messages": [{"role": "system", "content": "own"}, *HI], "stop": ["y"], "seed": 5}
    )
    assert (fake.requests[-1].stop, fake.requests[-1].seed) == (("y",), 5)
    assert "system:own|user:hi|" in fake._model.tokenizer.decode(fake.requests[-1].prompts[0])
    shown = http.send("/api/show", {"model": "demo"}).json
    assert (shown["system"], shown["template"]) == ("Be brief.", preset.template)
    assert shown["parameters"].splitlines() == ["top_k 5", 'stop "x"', "seed 3", "num_predict 7"]


class TestDownloadsOfTheRouter:
    """`POST` and `DELETE /models`, with events at `/models/sse`."""

    @staticmethod
    def listen(server: Served, until: str) -> tuple[threading.Thread, list[dict[str, Any]]]:
        found: list[dict[str, Any]] = []
        connection = server.connect()
        connection.request("GET", "/models/sse")
        response = connection.getresponse()

        def read() -> None:
            with contextlib.closing(connection):
                while not found or found[-1]["event"] != until:
                    text = response.readline().decode()
                    if text.startswith("data: "):
                        found.append(json.loads(text[6:]))

        thread = threading.Thread(target=read)
        thread.start()
        return thread, found

    def test_a_download_has_events_and_a_deletion(self, server, hub, fake, catalogue) -> None:
        thread, found = self.listen(server, "download_finished")
        assert server.send("/models", {"model": NAME}).json == {"success": True}
        thread.join(60)
        progress = [one["data"] for one in found if one["event"] == "download_progress"]
        size = demo_path().stat().st_size
        assert (progress[-1]["downloaded"], progress[-1]["total"]) == (size, size)
        assert found[-1] == {"model": NAME, "event": "download_finished", "data": {}}
        assert fake.added[NAME].path.read_bytes() == demo_path().read_bytes()
        wait_for(lambda: server.server._server.jobs.get(f"download {NAME}") is None)
        assert server.send(f"/models?model={NAME}", method="DELETE").json == {"success": True}
        assert catalogue.names() == []
        assert server.send(f"/models?model={NAME}", method="DELETE").status == 404

    def test_failures(self, server, hub, fake, catalogue) -> None:
        thread, found = self.listen(server, "download_failed")
        assert server.send("/models", {"model": "user/none"}).status == 200
        thread.join(60)
        assert "no such repository" in found[-1]["data"]["error"]
        assert (catalogue.names(), fake.added) == ([], {})
        (own,) = {info.name for info in fake.models()}
        for wrong in ({}, {"model": "../x"}, {"model": own}):
            assert server.send("/models", wrong).status == 400
        assert server.send("/models", method="DELETE").status == 400

    def test_without_a_catalogue(self, http) -> None:
        assert http.send("/models", {"model": NAME}).status == 501
        assert http.send(f"/models?model={NAME}", method="DELETE").status == 501

    def test_unload_ends_a_download(self, server, hub, fake, catalogue, monkeypatch) -> None:
        began, ended = threading.Event(), threading.Event()

        def endless(reference: Any, folder: Path, progress: Any) -> Any:
            began.set()
            try:
                while True:
                    progress("m", 1, 2)
                    ended.wait(0.01)
            finally:
                ended.set()

        monkeypatch.setattr(ollama_models, "fetch", endless)
        thread, found = self.listen(server, "download_failed")
        assert server.send("/models", {"model": NAME}).status == 200
        assert began.wait(30)
        assert server.send("/models", {"model": NAME}).status == 400
        assert server.send("/models/unload", {"model": NAME}).json == {"success": True}
        thread.join(60)
        assert found[-1]["data"] == {"error": "it was cancelled"}
        assert ended.wait(30)
        assert catalogue.names() == []
