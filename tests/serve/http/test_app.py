from pathlib import Path


def test_page(serve, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>hello</h1>")
    (tmp_path / "app.js").write_text("1")
    http = serve(page=tmp_path, api_keys=("secret",))
    reply = http.send("/")
    assert (reply.status, reply.body) == (200, b"<h1>hello</h1>")
    assert reply.headers["content-security-policy"].startswith("default-src 'self'")
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


def test_long_names_are_refused(http) -> None:
    for name in ("samplers", "dry_sequence_breakers"):
        reply = http.send("/v1/completions", {"prompt": "a", name: ["top_k", "x" * 129]})
        assert (reply.status, reply.json["error"]["param"]) == (400, f"{name}[1]")
