import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_page(serve, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>hello</h1>")
    (tmp_path / "app.js").write_text("1")
    http = serve(page=tmp_path, api_keys=("secret",))
    reply = http.send("/")
    assert (reply.status, reply.body) == (200, b"<h1>hello</h1>")
    assert "content-security-policy" not in reply.headers  # the own page has one
    assert http.send("/app.js").headers["x-content-type-options"] == "nosniff"
    assert http.send("/v1/models").status == 401
    for path in ("/nothing", "/../secret", "/%2e%2e/secret", "/..%2fsecret"):
        assert http.send(path).status == 404


def test_other_methods_are_refused_beside_the_page(serve, tmp_path: Path) -> None:
    for http in (serve(), serve(page=tmp_path)):
        for method, path, allowed in (("GET", "/v1/chat/completions", "POST"), ("PUT", "/lora-adapters", "GET, POST")):
            reply = http.send(path, method=method)
            assert (reply.status, reply.json["error"]["code"]) == (405, "method_not_allowed")
            assert reply.headers["allow"] == allowed


def test_unknown_paths(serve, tmp_path: Path) -> None:
    for http in (serve(), serve(page=tmp_path)):
        for method in ("GET", "POST", "PUT", "DELETE"):
            assert http.send("/nothing", method=method).status == 404


def test_long_names_are_refused(http) -> None:
    for name in ("samplers", "dry_sequence_breakers"):
        reply = http.send("/v1/completions", {"prompt": "a", name: ["top_k", "x" * 129]})
        assert (reply.status, reply.json["error"]["param"]) == (400, f"{name}[1]")


@pytest.mark.medium
def test_unused_apis_are_not_imported() -> None:
    code = """
import sys
from llamacli.serve.http.app import create_app
from llamacli.serve.http.routes import ROUTES
create_app(None)
handlers = {route.handler.partition(":")[0] for route in ROUTES}
print(len(handlers) > 5, sorted(handlers & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.stdout.strip() == "True []"
