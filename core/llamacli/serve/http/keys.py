"""API keys with names and limits, from options and from a file."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from starlette.datastructures import Headers

from llamacli.errors import InvalidRequestError
from llamacli.serve.errors import ApiKeyError, RateLimitError

LOOK_S = 1.0
"""Seconds between looks for a changed file."""

_LIMITS = ("requests", "tokens", "streams")
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_MOST = 10**12

_log = logging.getLogger(__name__)


@attrs.frozen
class ApiKey:
    """Key of a client.

    - `name`: name in log and metrics; that of a key without one is made of its digest.
    - `requests`, `tokens`: requests, and tokens of prompts and replies, in a minute; `streams`: requests that wait or
      run at once. None for no limit.
    """

    secret: str = attrs.field(repr=False)
    name: str = attrs.field()
    requests: int | None = None
    tokens: int | None = None
    streams: int | None = None

    @name.default
    def _name(self) -> str:
        return self.owner

    @property
    def owner(self) -> str:
        """Digest, under which the key's objects are stored."""
        return hashlib.sha256(self.secret.encode()).hexdigest()[:12]


def as_keys(keys: Iterable[str | ApiKey]) -> tuple[ApiKey, ...]:
    """Keys of texts; those without names and limits."""
    return tuple(ApiKey(key) if isinstance(key, str) else key for key in keys)


def read_keys(file: Path, others: Sequence[ApiKey] = ()) -> tuple[ApiKey, ...]:
    """Keys of a file, one a line.

    Behind a key there may be `name=`, `requests=`, `tokens=` and `streams=`; `#` begins a comment. `others` are keys
    that must not be there again. Raises InvalidRequestError that names the line and never shows a key, OSError.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{file}: it is not text in UTF-8") from None
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        secret, *fields = line.partition("#")[0].split() or [""]
        if not secret:
            continue
        try:
            key = ApiKey(secret, **dict(map(_field, fields)))
            if len({field.partition("=")[0] for field in fields}) < len(fields):
                raise InvalidRequestError("a field is there twice")
            _expect_new(key, [*others, *keys])
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{file}, line {number}: {error}") from None
        keys.append(key)
    if not keys:
        raise InvalidRequestError(f"{file}: it has no key")
    return tuple(keys)


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if name == "name" and equals:
        if not _NAME.fullmatch(value):
            raise InvalidRequestError("a name has up to 64 letters, digits and . _ @ -")
        return name, value
    if name in _LIMITS and equals:
        if not (value.isascii() and value.isdecimal() and 1 <= int(value[:20]) <= _MOST):
            raise InvalidRequestError(f"{name} must be a whole number from 1 to {_MOST}")
        return name, int(value)
    raise InvalidRequestError("behind a key there are name=, requests=, tokens= and streams= only")


def _expect_new(key: ApiKey, others: Sequence[ApiKey]) -> None:
    for other in others:
        if other.secret == key.secret:
            raise InvalidRequestError("this key is there already")
        if other.name == key.name:
            raise InvalidRequestError(f"the name {key.name} is that of another key")


class Bucket:
    """Token bucket of a limit a minute, which may be overdrawn."""

    def __init__(self, limit: int, clock: Callable[[], float]):
        self.limit, self._clock = limit, clock
        self._left, self._at = float(limit), clock()

    def take(self, n: int) -> None:
        """Take away `n`; what is missing fills up later."""
        now = self._clock()
        self._left = min(self.limit, self._left + (now - self._at) * self.limit / 60) - n
        self._at = now

    def seconds_until(self, n: int) -> float:
        """Seconds until `n` are there, 0 if they are."""
        self.take(0)
        return max(0.0, (n - self._left) * 60 / self.limit)


class Keys:
    """Keys of a server, with the use of each.

    For one event loop. The file is read again when it has changed. If it is wrong then, the log says why, and the keys
    before stay.
    """

    def __init__(
        self, keys: Sequence[ApiKey], file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._own, self._file, self._clock = tuple(keys), file, clock
        self._stamp, self._looked_at = self._state(), clock()
        self._keys = (*self._own, *(read_keys(file, self._own) if file is not None else ()))
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._open: dict[str, int] = {}

    def find(self, headers: Headers) -> ApiKey | None:
        """Key that a request sends, None if the server has none.

        All keys are compared, in constant time. Raises ApiKeyError.
        """
        self._look()
        if not self._keys:
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = (token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode(
            "utf-8", "surrogateescape"
        )
        found = None
        for key in self._keys:
            if hmac.compare_digest(given, key.secret.encode()):
                found = key
        if found is None:
            raise ApiKeyError("the API key is missing or wrong: send the header Authorization: Bearer KEY")
        return found

    @contextlib.contextmanager
    def admitted(self, key: ApiKey | None) -> Iterator[None]:
        """Count a request of a key until the context ends.

        Raises RateLimitError, and then nothing is counted.
        """
        if key is None:
            yield
            return
        n_open = self._open.get(key.secret, 0)
        if key.streams is not None and n_open >= key.streams:
            raise _refusal(f"{n_open} requests of this key wait or run, and {key.streams} may", 1)
        for kind in ("tokens", "requests"):
            bucket = self._bucket(key, kind)
            seconds = 0.0 if bucket is None else bucket.seconds_until(1)
            if bucket is not None and seconds > 0:
                raise _refusal(f"this key may use {bucket.limit} {kind} a minute", math.ceil(seconds))
        requests = self._bucket(key, "requests")
        if requests is not None:
            requests.take(1)
        self._open[key.secret] = n_open + 1
        try:
            yield
        finally:
            self._open[key.secret] -= 1

    def of(self, owner: str) -> ApiKey | None:
        """Key of a digest, None if there is none."""
        return next((key for key in self._keys if key.owner == owner), None)

    def use(self, key: ApiKey, n_tokens: int) -> None:
        """Count tokens of prompts and replies."""
        bucket = self._bucket(key, "tokens")
        if bucket is not None:
            bucket.take(n_tokens)

    def _bucket(self, key: ApiKey, kind: str) -> Bucket | None:
        limit = getattr(key, kind)
        if limit is None:
            return None
        bucket = self._buckets.get((key.secret, kind))
        if bucket is None or bucket.limit != limit:
            bucket = self._buckets[key.secret, kind] = Bucket(limit, self._clock)
        return bucket

    def _look(self) -> None:
        """Read the file again if it has changed."""
        now = self._clock()
        if self._file is None or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        stamp = self._state()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = (*self._own, *read_keys(self._file, self._own))
        except (InvalidRequestError, OSError) as error:
            _log.error("the keys stay as they were: %s", error)
            return
        known = {key.secret for key in self._keys}
        self._buckets = {entry: bucket for entry, bucket in self._buckets.items() if entry[0] in known}
        _log.info("%d keys read from %s", len(self._keys) - len(self._own), self._file)

    def _state(self) -> tuple[int, ...]:
        """State of the file, () if it cannot be read."""
        try:
            status = self._file.stat() if self._file is not None else None
        except OSError:
            return ()
        return () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def _refusal(text: str, seconds: int) -> RateLimitError:
    return RateLimitError(text, retry_after=seconds)
