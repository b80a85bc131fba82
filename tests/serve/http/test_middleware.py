import socket

import pytest

from llamacli.serve.http.middleware import host_name, is_loopback


@pytest.mark.parametrize("given", ["abc", "a" * 128, "with spaces"])
def test_request_id_of_the_client_is_kept(given: str, http) -> None:
    assert http.send("/health", headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "\xe9"])
def test_other_request_ids_are_replaced(given: str, http) -> None:
    ids = {http.send("/health", headers={"X-Request-Id": given}).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert given not in ids


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]:80", "localhost.evil"])
def test_host_of_others_is_refused_on_loopback(host: str, http) -> None:
    reply = http.send("/health", headers={"Host": host})
    assert (reply.status, reply.json["error"]["code"]) == (403, "invalid_host")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:99", "LOCALHOST:8080", "[::1]:80", "chat.localhost"])
def test_host_of_the_loopback_is_accepted(host: str, http) -> None:
    assert http.send("/health", headers={"Host": host}).status == 200


def test_probe_of_http_1_0_needs_no_host(http) -> None:
    with socket.create_connection(("127.0.0.1", http.port), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")


def test_allowed_hosts(serve) -> None:
    http = serve(allowed_hosts=("box.lan",))
    assert http.send("/health", headers={"Host": "box.lan:8080"}).status == 200


def test_no_cors_by_default(http) -> None:
    reply = http.send("/health", headers={"Origin": "https://page.example"})
    assert "access-control-allow-origin" not in reply.headers
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert http.send("/v1/chat/completions", headers=preflight, method="OPTIONS").status == 405


def test_cors_for_this_machine(serve) -> None:
    http = serve(cors_origins=("localhost",))
    local = ("http://localhost", "http://localhost:3000", "http://127.0.0.1:3000", "http://[::1]:3000")
    others = ("http://localhost.evil.com", "http://127.evil.com", "http://notlocalhost", "null", "http://[")
    for origin, allowed in (*dict.fromkeys(local, True).items(), *dict.fromkeys(others, False).items()):
        found = http.send("/v1/models", headers={"Origin": origin}).headers.get("access-control-allow-origin")
        assert found == (origin if allowed else None)


def test_cors_for_all_with_keys(serve) -> None:
    """A page needs the key, and no cookie stands for it."""
    http = serve(cors_origins=("*",), api_keys=("secret",))
    origin = {"Origin": "https://page.example"}
    refused = http.send("/v1/models", headers=origin)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
    assert "access-control-allow-credentials" not in refused.headers
    assert http.send("/v1/models", headers={**origin, "Authorization": "Bearer secret"}).status == 200


def test_cors_for_listed_origins(serve) -> None:
    http = serve(cors_origins=("https://page.example",), api_keys=("secret",))
    preflight = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }
    reply = http.send("/v1/chat/completions", headers=preflight, method="OPTIONS")
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "https://page.example"
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert reply.headers["access-control-allow-private-network"] == "true"
    refused = http.send("/v1/models", headers={"Origin": "https://page.example"})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
    other = http.send("/health", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"X-Api-Key": ""}, {"X-Api-Key": "s\xe9cret"}],
)
def test_wrong_keys_are_refused(headers: dict, serve) -> None:
    reply = serve(api_keys=("secret", "other")).send("/v1/models", headers=headers)
    assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers", [{"Authorization": "Bearer secret"}, {"authorization": "bearer other"}, {"X-Api-Key": "secret"}]
)
def test_keys_are_accepted(headers: dict, serve) -> None:
    assert serve(api_keys=("secret", "other")).send("/v1/models", headers=headers).status == 200


def test_public_paths_need_no_key(serve) -> None:
    http = serve(api_keys=("secret",))
    assert {path: http.send(path).status for path in ("/", "/health", "/metrics", "/slots", "/props")} == {
        "/": 200, "/health": 200, "/metrics": 401, "/slots": 401, "/props": 401,
    }  # fmt: skip


def test_host_names() -> None:
    assert [host_name(text) for text in ("A:1", "[::1]:2", "::1", "")] == ["a", "::1", "", ""]
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "0.0.0.0", "box")] == [True, True, False, False]
