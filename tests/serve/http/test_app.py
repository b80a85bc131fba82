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
