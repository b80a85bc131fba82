"""Authenticated frames over TCP: HMAC challenge, length prefixes, limits.

Both ends have a shared secret and prove it by a challenge; each frame then has a MAC over its number, direction and
content, so that none can be changed, left out or repeated. Frames are not encrypted.

A frame is its lengths, a JSON object, the bytes of its arrays, and the MAC. All numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError, StageError

MAGIC = b"llamacli-stage-1"
MAX_HEADER = 1 << 20
MAX_BODY = 1 << 30
MIN_SECRET = 16
"""Fewest bytes of a secret."""

_NONCE, _MAC = 32, 16
_LENGTHS = struct.Struct("<IQ")
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("<f4", "<i4", "<i8")}
_POLL_S = 0.5
_KEPT = 256
"""Headers that are kept: nodes that divide rows send equal ones many times a batch."""

_LARGE = 1 << 16
"""Bytes of a body from which on the MAC is not joined to it, which would copy it."""

Arrays = Sequence[npt.NDArray[Any]]


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Secret of a file, without white space around it.

    Raises InvalidRequestError if it is shorter than MIN_SECRET bytes, or others than its owner may read the file;
    OSError.
    """
    path = Path(path)
    secret = path.read_bytes().strip()
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise InvalidRequestError(f"{path}: others than its owner may read the secret: chmod 600 it")
    if len(secret) < MIN_SECRET:
        raise InvalidRequestError(f"{path}: the secret has {len(secret)} bytes, at least {MIN_SECRET} are needed")
    return secret


def address_of(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, with brackets around an IPv6 address.

    Raises InvalidRequestError.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host.strip("[]") or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequestError(f"{text!r} is not an address such as node2:7070")
    return host.strip("[]"), int(port)


def text_of(address: tuple[str, int]) -> str:
    """HOST:PORT, the inverse of `address_of`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@attrs.frozen
class Frame:
    """Frame that was received: its kind, fields and arrays."""

    kind: str
    fields: dict[str, Any]
    arrays: list[npt.NDArray[Any]]

    def text(self, name: str) -> str:
        """Field that is a text. Raises StageError."""
        return str(self._field(name, str))

    def number(self, name: str) -> int:
        """Field that is an integer of at least 0. Raises StageError."""
        value = self._field(name, int)
        if isinstance(value, bool) or value < 0:
            raise StageError(f"a frame of kind {self.kind!r} has {name} {value!r}")
        return int(value)

    def numbers(self, name: str) -> list[int]:
        """Field that is a list of integers. Raises StageError."""
        value = self._field(name, list)
        if not all(type(one) is int for one in value):
            raise StageError(f"a frame of kind {self.kind!r} has {name} {value!r}")
        return list(value)

    def _field(self, name: str, kind: type) -> Any:
        value = self.fields.get(name)
        if not isinstance(value, kind):
            raise StageError(f"a frame of kind {self.kind!r} has {name} {value!r}")
        return value


class Connection:
    """Authenticated connection; threads may send at once, one receives.

    `peer` names the other end in errors.
    """

    def __init__(self, sock: socket.socket, peer: str, key: bytes, *, is_server: bool):
        self.peer, self._socket, self._key = peer, sock, key
        self._own, self._other = (b"worker", b"caller") if is_server else (b"caller", b"worker")
        self._n_sent = self._n_received = 0
        self._sending = threading.Lock()
        self._buffer, self._first, self._last = memoryview(bytearray(_LARGE)), 0, 0
        self.heard_at = time.monotonic()

    @classmethod
    def accept(cls, sock: socket.socket, peer: str, secret: bytes, timeout_s: float) -> Connection:
        """Check that a caller has the secret, and prove it too.

        Raises StageError.
        """
        with _named(peer):
            sock.settimeout(timeout_s)
            ours = secrets.token_bytes(_NONCE)
            sock.sendall(MAGIC + ours)
            greeting = _exactly(sock, len(MAGIC) + _NONCE + 32)
            theirs, proof = greeting[len(MAGIC) : -32], greeting[-32:]
            if not greeting.startswith(MAGIC):
                raise StageError("it speaks another protocol or version of it")
            if not hmac.compare_digest(proof, _proof(secret, b"caller", ours, theirs)):
                raise StageError("it has another secret")
            sock.sendall(_proof(secret, b"worker", ours, theirs))
        return cls(_tuned(sock), peer, _proof(secret, b"frames", ours, theirs), is_server=True)

    @classmethod
    def open(cls, address: tuple[str, int], secret: bytes, timeout_s: float) -> Connection:
        """Connect to a worker; both ends prove the secret.

        Raises StageError.
        """
        peer = f"worker {address[0]}:{address[1]}"
        with _named(peer):
            sock = socket.create_connection(address, timeout_s)
            try:
                greeting = _exactly(sock, len(MAGIC) + _NONCE)
                if not greeting.startswith(MAGIC):
                    raise StageError("it is no worker, or one of another version")
                theirs, ours = greeting[len(MAGIC) :], secrets.token_bytes(_NONCE)
                sock.sendall(MAGIC + ours + _proof(secret, b"caller", theirs, ours))
                try:
                    proof = _exactly(sock, 32)
                except StageError:
                    raise StageError("it refused the secret") from None
                if not hmac.compare_digest(proof, _proof(secret, b"worker", theirs, ours)):
                    raise StageError("it has another secret")
            except BaseException:
                sock.close()
                raise
        return cls(_tuned(sock), peer, _proof(secret, b"frames", theirs, ours), is_server=False)

    def send(self, kind: str, arrays: Arrays = (), **fields: Any) -> None:
        """Send a frame.

        Raises StageError if the connection is lost or the frame too large.
        """
        made = [np.ascontiguousarray(array) for array in arrays]
        described = tuple((array.dtype.str, array.shape) for array in made)
        header = _encoded(kind, described, fields) if kind != "part" else _encoded_part(described, **fields)
        n_body = sum(array.nbytes for array in made)
        if len(header) > MAX_HEADER or n_body > MAX_BODY:
            raise StageError(f"{self.peer}: a frame of {len(header)} and {n_body} bytes is too large")
        data = b"".join([_LENGTHS.pack(len(header), n_body), header, *(array.tobytes() for array in made)])
        with self._sending:
            try:
                mac = self._mac(self._own, self._n_sent, [data])
                self._n_sent += 1
                self._socket.sendall(data + mac if n_body < _LARGE else data)
                if n_body >= _LARGE:
                    self._socket.sendall(mac)
            except (OSError, ValueError) as error:
                raise _of_socket(error, self.peer) from None

    def receive(self, check: Callable[[], None] = lambda: None) -> Frame:
        """Receive a frame.

        `check` is called now and then while nothing comes, and raises what ends the wait. Raises StageError for a
        connection that is lost and a frame that is malformed, too large or not the next one.
        """
        try:
            lengths = self._read(_LENGTHS.size, check)
            n_header, n_body = _LENGTHS.unpack(lengths)
            if n_header > MAX_HEADER or n_body > MAX_BODY:
                raise StageError(f"a frame of {n_header} and {n_body} bytes is too large")
            data = memoryview(self._read(n_header + n_body + _MAC, check))
            expected = self._mac(self._other, self._n_received, [lengths, data[:-_MAC]])
            if not hmac.compare_digest(data[-_MAC:], expected):
                raise StageError("a frame was changed, or is not the next one")
            self._n_received += 1
            return _parsed(bytes(data[:n_header]), data[n_header:-_MAC])
        except (StageError, OSError, ValueError) as error:
            raise _of_socket(error, self.peer) from None

    def expect_open(self) -> None:
        """Raise StageError once the other end has closed the connection.

        All that it sent before is read first.
        """
        with _named(self.peer):
            is_ended = self._first == self._last and _readable(self._socket, 0)
            if is_ended and not self._socket.recv(1, socket.MSG_PEEK):
                raise StageError("the connection was closed")

    def _read(self, n: int, check: Callable[[], None]) -> bytearray:
        """Next bytes; short frames come with one call of the system."""
        data = bytearray(n)
        unread = memoryview(data)
        while True:
            at = min(len(unread), self._last - self._first)
            unread[:at] = self._buffer[self._first : self._first + at]
            self._first, unread = self._first + at, unread[at:]
            if not unread:
                return data
            check()
            if not _readable(self._socket, _POLL_S):
                continue
            is_long = len(unread) >= len(self._buffer)
            got = self._socket.recv_into(unread if is_long else self._buffer)
            if not got:
                raise StageError("the connection was closed")
            self.heard_at = time.monotonic()
            if is_long:
                unread = unread[got:]
            else:
                self._first, self._last = 0, got

    def _mac(self, sender: bytes, number: int, parts: Sequence[Any]) -> bytes:
        digest = hashlib.blake2b(sender + number.to_bytes(8, "little"), digest_size=_MAC, key=self._key)
        for part in parts:
            digest.update(part)
        return digest.digest()

    def close(self) -> None:
        """Close the connection; a thread that receives ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _encoded(kind: str, described: tuple[Any, ...], fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"kind": kind, "arrays": described, **fields}).encode()


_encoded_part = functools.lru_cache(_KEPT)(lambda described, number: _encoded("part", described, {"number": number}))


@functools.lru_cache(_KEPT)
def _decoded(header: bytes) -> tuple[dict[str, Any], str, list[tuple[np.dtype[Any], list[int]]], list[int]]:
    """Fields, kind, and types, shapes and sizes of the arrays.

    None of them may be changed.
    """
    try:
        fields = json.loads(header)
        kind, described = fields.pop("kind"), fields.pop("arrays")
        shapes = [(_DTYPES[dtype], [int(n) for n in shape]) for dtype, shape in described]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise StageError(f"a frame is malformed: {type(error).__name__}: {error}") from None
    if not isinstance(kind, str) or any(n < 0 or n > MAX_BODY for _, shape in shapes for n in shape):
        raise StageError(f"a frame is malformed: {kind!r} of arrays {described}")
    return fields, kind, shapes, [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]


def _parsed(header: bytes, body: memoryview) -> Frame:
    fields, kind, shapes, sizes = _decoded(header)
    if sum(sizes) != len(body):
        raise StageError(f"a frame is malformed: its arrays have {sum(sizes)} bytes, and it has {len(body)}")
    arrays, at = [], 0
    for (dtype, shape), size in zip(shapes, sizes, strict=True):
        arrays.append(np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape))
        at += size
    return Frame(kind, fields, arrays)


def _proof(secret: bytes, role: bytes, worker: bytes, caller: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + role + worker + caller, "sha256")


def _exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            raise StageError("the connection was closed")
        data += part
    return data


def _readable(sock: socket.socket, timeout_s: float) -> bool:
    import select

    if not hasattr(select, "poll"):  # Windows
        return bool(select.select([sock], [], [], timeout_s)[0])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def _tuned(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


@contextlib.contextmanager
def _named(peer: str) -> Any:
    """Convert errors of a socket to StageError, which names the other end."""
    try:
        yield
    except (StageError, OSError, ValueError) as error:
        raise _of_socket(error, peer) from None


def _of_socket(error: Exception, peer: str) -> StageError:
    """Error that names the other end."""
    if isinstance(error, StageError):
        return StageError(str(error) if str(error).startswith(peer) else f"{peer}: {error}")
    return StageError(
        f"{peer}: it does not answer" if isinstance(error, TimeoutError) else f"{peer}: the connection is lost: {error}"
    )
