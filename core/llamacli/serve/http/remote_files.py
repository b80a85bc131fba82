"""Files at remote addresses, which are public ones only (against SSRF)."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse

from llamacli.media.pictures import MAX_BYTES
from llamacli.serve.errors import BadRequestError

TIMEOUT_S = 15.0
"""Seconds for a file, with its redirects."""

MAX_REDIRECTS = 3

_PIECE = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)


def fetch(url: str, place: str) -> bytes:
    """Fetch a file by HTTP or HTTPS, without proxies, cookies or credentials.

    Host names are resolved once, and the connection goes to the address that was checked, of a redirect too. Raises
    BadRequestError, which names `place`, for an address that is not public, an answer without a file, more than
    `MAX_BYTES`, and after `TIMEOUT_S`.
    """
    until, current = time.monotonic() + TIMEOUT_S, url
    try:
        for _ in range(MAX_REDIRECTS + 1):
            target, data = _get(current, until)
            if data is not None:
                return data
            current = urllib.parse.urljoin(current, target)
        raise _RefusedError(f"more than {MAX_REDIRECTS} redirects")
    except (OSError, http.client.HTTPException, ValueError, UnicodeError) as error:
        reason = str(error) if isinstance(error, _RefusedError) else f"it cannot be read: {type(error).__name__}"
        raise BadRequestError(f"{place}: {url[:200]!a}: {reason}", place, "invalid_image_url") from None


class _RefusedError(ValueError):
    """Reason that the client may read."""


def _get(url: str, until: float) -> tuple[str, bytes | None]:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise _RefusedError("not an address http://HOST/... or https://HOST/...")
    host, is_tls = parts.hostname, parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
        f"?{parts.query}" if parts.query else ""
    )
    connection = http.client.HTTPConnection(host, port, timeout=_left(until))
    stream = socket.create_connection((public_address(host, port), port), timeout=_left(until))
    if is_tls:
        context = ssl.create_default_context()
        stream = context.wrap_socket(stream, server_hostname=host, do_handshake_on_connect=False)
    # A socket's own timeout begins anew with every byte.
    timer = threading.Timer(_left(until), _shut, (stream,))
    timer.daemon = True
    timer.start()
    try:
        if isinstance(stream, ssl.SSLSocket):
            stream.do_handshake()
        connection.sock = stream
        connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "llamacli", "Connection": "close"})
        response = connection.getresponse()
        with response:
            if response.status in _REDIRECTS:
                return response.getheader("Location", ""), None
            if response.status != http.HTTPStatus.OK:
                raise _RefusedError(f"it answers with the status {response.status}")
            data = bytearray()
            while piece := response.read1(_PIECE):
                data += piece
                if len(data) > MAX_BYTES:
                    raise _RefusedError(f"it is larger than the {MAX_BYTES} bytes of a picture")
            _left(until)
            return "", bytes(data)
    finally:
        timer.cancel()
        connection.close()
        stream.close()


def _shut(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def _left(until: float) -> float:
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise _RefusedError(f"it took longer than {TIMEOUT_S:g} seconds")
    return seconds


def public_address(host: str, port: int) -> str:
    """Address of a host, of which all addresses are public."""
    found = [info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        if not is_public(str(address)):
            raise _RefusedError("its host is not a public one")
    return str(found[0])


def is_public(address: str) -> bool:
    """True for a global unicast address.

    Loopback, private, link-local, shared and reserved ones are none, nor those of IPv6 that stand for such of IPv4.
    """
    one = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(one, ipaddress.IPv6Address):
        inner = one.ipv4_mapped or one.sixtofour or (one.teredo[1] if one.teredo else None)
        if one in _NAT64:
            inner = ipaddress.IPv4Address(int(one) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return one.is_global and not one.is_multicast and not one.is_reserved


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
