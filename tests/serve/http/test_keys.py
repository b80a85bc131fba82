"""API keys: names, limits, changes of their file, use in the metrics."""

import os
import re
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from llamacli.errors import InvalidRequestError
from llamacli.serve.errors import ApiKeyError, RateLimitError
from llamacli.serve.http.keys import ApiKey, Keys, as_keys, read_keys

BODY = {"messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def test_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two\tname=ann@lab requests=60 tokens=9000 streams=2  # laptop\n")
    one, two = read_keys(file)
    assert (one.secret, one.name, one.requests, one.tokens, one.streams) == ("one", one.owner, None, None, None)
    assert two == ApiKey("two", "ann@lab", 60, 9000, 2)
    assert "two" not in repr(two)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no key"),
        ("one\none", "line 2: this key is there already"),
        ("one name=a\ntwo name=a", "line 2: the name a is that of another key"),
        ("zero", "line 1: this key is there already"),
        ("one two", "line 1: behind a key"),
        ("one requests=0", "line 1: requests must be a whole number from 1"),
        ("one tokens=-1", "line 1: tokens must be a whole number from 1"),
        ("one streams=1.5", "line 1: streams must be a whole number from 1"),
        ("one requests=1 requests=2", "line 1: a field is there twice"),
        ("one name=", "line 1: a name has up to 64"),
        ("one name=a\x1bb", "line 1: a name has up to 64"),
        ("one limit=5", "line 1: behind a key"),
        (b"\xff", "it is not text in UTF-8"),
    ],
)
def test_wrong_files(text: str | bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidRequestError, match=message) as error:
        read_keys(file, as_keys(["zero"]))
    assert not re.search(r"\b(zero|one|two)\b", str(error.value).replace(str(tmp_path), ""))


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(as_keys(["a", "b", "c"]))
    compared: list[bytes] = []
    monkeypatch.setattr("hmac.compare_digest", lambda given, key: compared.append(key) or given == key)
    found = keys.find(bearer("b"))
    assert (found and found.secret, compared) == ("b", [b"a", b"b", b"c"])
    with pytest.raises(ApiKeyError):
        keys.find(Headers({}))
    assert Keys(()).find(Headers({})) is None


def test_limits_fill_up_again() -> None:
    now = [100.0]
    key = ApiKey("k", requests=2, tokens=60, streams=2)
    keys = Keys([key], clock=lambda: now[0])
    with keys.admitted(key), keys.admitted(key), pytest.raises(RateLimitError, match="2 requests of this key"):
        keys.admitted(key).__enter__()
    with pytest.raises(RateLimitError, match="2 requests a minute") as error, keys.admitted(key):
        pass
    assert error.value.retry_after == 30
    now[0] += 30
    with keys.admitted(key):
        keys.use(key, 100)  # more than are there
    now[0] += 30
    with pytest.raises(RateLimitError, match="60 tokens a minute") as error, keys.admitted(key):
        pass
    assert error.value.retry_after == 11  # seconds: it was 40 below 0, is 10 below, and one must be there
    now[0] += 11
    with keys.admitted(key):
        pass


def test_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now, file = [0.0], tmp_path / "keys"
    file.write_text("old name=ann requests=1")
    keys = Keys(as_keys(["own"]), file, clock=lambda: now[0])
    found = keys.find(bearer("old"))
    assert found is not None
    with keys.admitted(found):
        pass

    def change(text: str) -> None:
        file.write_text(text)
        now[0] += 1.5
        os.utime(file, ns=(int(now[0] * 1e9),) * 2)

    change("old name=ann requests=1\nnew")
    assert keys.find(bearer("new"))
    with pytest.raises(RateLimitError), keys.admitted(keys.find(bearer("old"))):  # what it has used still counts
        pass
    change("new\nnew")
    assert keys.find(bearer("new"))
    assert "the keys stay as they were" in caplog.text
    assert "line 2: this key is there already" in caplog.text
    change("new")
    with pytest.raises(ApiKeyError):
        keys.find(bearer("old"))
    file.unlink()
    now[0] += 2
    assert keys.find(bearer("new"))
    assert keys.find(bearer("own"))


def test_use_of_keys_over_http(serve) -> None:
    http = serve(api_keys=(ApiKey("secret-a", "ann", requests=1), ApiKey("secret-b", "ben")))
    ann, ben = ({"Authorization": f"Bearer secret-{letter}"} for letter in "ab")
    assert http.send("/v1/chat/completions", BODY, ann).status == 200
    refused = http.send("/v1/chat/completions", BODY, ann)
    assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) in (59, 60)
    assert http.send("/v1/models", headers=ann).status == 200  # only what the engine computes counts
    assert [http.send("/v1/chat/completions", BODY, ben).status for _ in range(3)] == [200] * 3
    metrics = http.send("/metrics", headers=ben).body.decode()
    assert 'llamacli_key_requests_total{key="ann",status="429"} 1.0' in metrics
    assert 'llamacli_key_requests_total{key="ben",status="200"} 3.0' in metrics
    assert 'llamacli_key_tokens_total{key="ben",kind="generated"} 9.0' in metrics
    assert "secret-" not in metrics
