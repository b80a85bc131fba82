"""Files of the web page: headers and contents."""

from __future__ import annotations

import re

import pytest

from llamacli.serve.http.page import PAGE, TYPES
from llamacli.serve.http.schemas.chat import ChatRequest
from llamacli.serve.http.schemas.common import Generation, Sampling
from llamacli.util.sampling_params import PARAMETERS

FILES = sorted(path.name for path in PAGE.iterdir() if path.is_file())
SCRIPTS = [name for name in FILES if name.endswith(".js")]
MAX_SCRIPT = 200_000


@pytest.fixture(scope="module")
def page(shared_engine):
    """Server with the page and a key."""
    from http_server import served

    with served(shared_engine, page=PAGE, api_keys=("secret",)) as server:
        yield server


@pytest.mark.medium
def test_page_needs_no_key(page) -> None:
    reply = page.send("/")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<title>llamacli</title>" in reply.body
    error = page.send("/v1/models")
    assert error.status == 401
    assert "API key" in error.json["error"]["message"]


@pytest.mark.medium
@pytest.mark.parametrize("name", FILES)
def test_files(page, name: str) -> None:
    reply = page.send(f"/{name}")
    assert reply.status == 200
    assert reply.headers["content-type"] == TYPES["." + name.rpartition(".")[2]]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-cache"
    again = page.send(f"/{name}", headers={"If-None-Match": reply.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


@pytest.mark.medium
def test_policy_allows_this_server_only(page) -> None:
    policy = page.send("/").headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["connect-src"] == "'self'"
    assert (rules["img-src"], rules["media-src"]) == ("'self' data:", "data:")
    assert rules["require-trusted-types-for"] == "'script'"
    assert rules["trusted-types"] == rules["object-src"] == rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in policy


@pytest.mark.medium
def test_unknown_files(page) -> None:
    for path in ("/nothing.js", "/../page.py", "/%2e%2e/http/page.py"):
        assert page.send(path).status == 404


@pytest.mark.medium
def test_api_is_not_shadowed(page) -> None:
    assert page.send("/health").json == {"status": "ok"}
    assert page.send("/openapi.json").json["openapi"]


def test_scripts_are_small() -> None:
    assert sum((PAGE / name).stat().st_size for name in SCRIPTS) < MAX_SCRIPT


def test_index_loads_all_scripts_ahead() -> None:
    index = (PAGE / "index.html").read_text()
    assert set(re.findall(r'(?:href|src)="([\w-]+\.js)"', index)) == set(SCRIPTS)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".js", ".html", ".css"))])
def test_nothing_from_other_hosts_and_no_markup_from_text(name: str) -> None:
    text = (PAGE / name).read_text()
    assert not re.search(r"""(?:src|href|from|import|url\()\s*=?\s*["'(]?\s*(?:https?:)?//""", text)
    parsers = (
        r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|DOMParser|createContextualFragment|srcdoc|document\.write)\b"
    )
    assert not re.search(parsers + r"|\beval\(|new Function| style=\"| on\w+=\"", text)


_BUDGETS = ("budget", "budget_tokens", "token_budget")


def test_parameters_of_the_page_and_of_the_table_are_all() -> None:
    text = (PAGE / "parameters.js").read_text()
    names = set(re.findall(r'\{ name: "(\w+)", label: "[^"]+".*?\n\s+meaning: "', text))
    other_names = {
        "repetition_penalty",
        "reasoning_budget_message",
        "reasoning_budget_tokens",
        *(f"thinking_{end}" for end in _BUDGETS),
    }
    assert {*Sampling.__struct_fields__} - other_names - PARAMETERS.keys() <= names
    assert names <= {*Generation.__struct_fields__, *ChatRequest.__struct_fields__} - PARAMETERS.keys()


def test_a_folder_in_the_place_of_the_page(serve, tmp_path) -> None:
    (tmp_path / "secret").write_text("x")
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text("<h1>own</h1>")
    (site / "link").symlink_to(tmp_path / "secret")
    http = serve(page=site)
    reply = http.send("/")
    assert (reply.status, reply.body) == (200, b"<h1>own</h1>")
    assert "content-security-policy" not in reply.headers
    assert reply.headers["x-content-type-options"] == "nosniff"
    for path in ("/link", "/../secret", "/%2e%2e/secret", "/none"):
        assert http.send(path).status == 404
    assert http.send("/v1/models").status == 200


def test_a_prefix_of_all_paths(serve) -> None:
    http = serve(page=PAGE, api_prefix="/a/llm")
    assert http.send("/a/llm/health").status == 200
    assert http.send("/a/llm/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).status == 200
    assert b"<html" in http.send("/a/llm/").body
    reply = http.send("/a/llm")
    assert (reply.status, reply.headers["location"]) == (307, "/a/llm/")
    for path in ("/", "/health", "/v1/models", "/a", "/a/llmx", "/a/llm/none", "//a/llm/health"):
        reply = http.send(path)
        assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
    reply = http.send("/a/llm/api/chat", {"model": "other", "messages": []})
    assert (reply.status, type(reply.json["error"])) == (404, str)
    reply = http.send("/a/llm/v1/messages", {"messages": []})
    assert (reply.status, reply.json["type"]) == (400, "error")
