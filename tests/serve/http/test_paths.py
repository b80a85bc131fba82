"""Names that are paths, in every request that takes a name."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from http_server import Served
from llamacli.serve.http.routes import ROUTES, loaded

pytestmark = pytest.mark.medium

NAMES = [
    "../out/secret", "a/../../out/secret", "%2e%2e/out/secret", "..%2fout%2fsecret", "..\\out\\secret", "OUT/secret",
    "OUT/secret\0.bin", "..", "", "a\nb", "x" * 10_000, "../" * 3_000, "link",
]  # fmt: skip
"""Names; OUT stands for the path of the folder that they must not lead to."""
FIELDS = {"model", "name", "source", "destination", "from", "filename", "input_file_id", "previous_response_id"}
SECRET = b"nobody may read this"
USUAL: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}], "prompt": "x", "input": "x", "content": "x", "query": "x",
    "documents": ["x"], "input_prefix": "a", "input_suffix": "b", "tokens": [1], "stream": False, "max_tokens": 1,
}  # fmt: skip


@pytest.fixture
def server(serve, tmp_path: Path) -> Served:
    folders = {name: tmp_path / name for name in ("catalogue", "slots", "media", "out")}
    for folder in folders.values():
        folder.mkdir(mode=0o700)
    (folders["out"] / "secret").write_bytes(SECRET)
    for name in ("slots", "media"):
        (folders[name] / "link").symlink_to(folders["out"] / "secret")
    return serve(
        catalogue=folders["catalogue"],
        slots=True,
        slot_folder=folders["slots"],
        media_path=folders["media"],
        strict=False,
    )


def files(folder: Path) -> dict[Path, bytes | None]:
    """Files outside of the catalogue, with their contents."""
    found = (path for path in folder.rglob("*") if not path.is_relative_to(folder / "catalogue"))
    return {path: path.read_bytes() if path.is_file() else None for path in found}


@pytest.mark.parametrize("given", NAMES, ids=lambda name: ascii(name[:20]))
def test_no_name_leads_out_of_a_folder(server: Served, tmp_path: Path, given: str) -> None:
    before = files(tmp_path)
    name = given.replace("OUT", str(tmp_path / "out"))
    for route in ROUTES:
        if (
            route.name == "/models/sse"
            or route.name == "/api/pull"
            or (route.method, route.name) == ("POST", "/models")
        ):
            continue  # the first does not end, and tests of pulls have a hub
        path = re.sub(r"\{\w+(:path)?\}", lambda _: quote(name, safe=""), route.name)
        query = "&".join(f"{key}={quote(name, safe='')}" for key in route.query)
        known = getattr(loaded(route.handler)[1], "__struct_encode_fields__", ("filename",))
        bodies = [USUAL | {field: name} for field in FIELDS.intersection(known)] if route.method != "GET" else [None]
        for body in bodies:
            reply = server.send(
                f"{path}?{query}", body if body is None else json.dumps(body).encode(), method=route.method
            )
            assert reply.status < 500 or reply.status == 501, (route, body)
            assert SECRET not in reply.body
    for url in (name, f"file://{name}", f"file:///{name}"):
        part = {"type": "image_url", "image_url": {"url": url}}
        reply = server.send("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
        assert reply.status in (400, 501)
        assert SECRET not in reply.body
    assert files(tmp_path) == before
