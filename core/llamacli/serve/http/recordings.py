"""Streams of replies that are kept for clients that come back."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Message, Send

MAX_BYTES = 4 << 20
"""Last bytes that are kept of a stream."""
MAX_ENDED_BYTES = 64 << 20
"""Bytes of all streams that have ended."""
KEPT_S = 300.0
"""Seconds that a stream is kept after its end."""


class Recording:
    """Stream of a reply that goes on without its client.

    It takes the place of the client's ASGI messages: `receive` tells of a client that stays until the recording is
    stopped, `send` keeps what is sent, and sends it to the client too.

    - `headers`: of the response, None before it has begun. `complete`: it has ended properly.
    - `started`, `completed`: seconds of the Unix clock, 0 before.
    """

    def __init__(self, send: Send):
        self._send = send
        self.headers: dict[str, str] | None = None
        self.started, self.completed = int(time.time()), 0
        self.complete = self.stopped = False
        self._kept, self._n_dropped = bytearray(), 0
        self._stop, self._changed = asyncio.Event(), asyncio.Event()

    @property
    def n_bytes(self) -> int:
        """Bytes of the stream so far."""
        return self._n_dropped + len(self._kept)

    @property
    def n_kept(self) -> int:
        """Bytes that are kept."""
        return len(self._kept)

    async def receive(self) -> Message:
        """Message that the client has left, once the recording is stopped."""
        await self._stop.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keep a part of the response, and send it."""
        if message["type"] == "http.response.start":
            if message["status"] == 200:
                self.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self._kept += message.get("body", b"")
            n_over = max(0, len(self._kept) - MAX_BYTES)
            del self._kept[:n_over]
            self._n_dropped += n_over
            self.complete = not message.get("more_body", False)
        self._tell()
        await self._send(message)

    def stop(self) -> None:
        """End the request as if its client had left."""
        self.stopped = True
        self._stop.set()

    def end(self) -> None:
        """Note that nothing more comes."""
        self.completed = int(time.time())
        self._tell()

    def has(self, offset: int) -> bool:
        """True if no byte behind an offset is lost."""
        return offset >= self._n_dropped

    async def read(self, offset: int) -> bytes:
        """Bytes from an offset on, once there are any.

        Empty at the end.
        """
        while self.n_bytes <= offset and not self.completed:
            await self._changed.wait()
        return bytes(self._kept[offset - self._n_dropped :]) if self.has(offset) else b""

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Recordings:
    """Recordings by owner and name, one of each."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, str], Recording] = {}

    def begin(self, owner: str, name: str, send: Send) -> Recording:
        """Begin a recording; an earlier one of its name is stopped."""
        self.stop(owner, name)
        recording = self._all[owner, name] = Recording(send)
        return recording

    def end(self, owner: str, name: str, recording: Recording) -> None:
        """End a recording; one without a stream is removed."""
        recording.end()
        if recording.headers is None:
            self._remove((owner, name), recording)
            return
        asyncio.get_running_loop().call_later(KEPT_S, self._remove, (owner, name), recording)
        ended = {key: one for key, one in self._all.items() if one.completed}
        n_bytes = sum(one.n_kept for one in ended.values())
        for key, one in ended.items():  # the oldest come first
            if n_bytes <= MAX_ENDED_BYTES:
                break
            n_bytes -= one.n_kept
            self._remove(key, one)

    def get(self, owner: str, name: str) -> Recording | None:
        """Recording of a name, None if there is none."""
        return self._all.get((owner, name))

    def named(self, owner: str, name: str) -> dict[str, Recording]:
        """Recordings of a name, or of it with `::MODEL` behind."""
        names = (known for of, known in self._all if of == owner)
        return {known: self._all[owner, known] for known in names if known == name or known.startswith(f"{name}::")}

    def stop(self, owner: str, name: str) -> None:
        """Stop a recording and remove it, if there is one."""
        recording = self._all.pop((owner, name), None)
        if recording is not None:
            recording.stop()

    def _remove(self, key: tuple[str, str], recording: Recording) -> None:
        if self._all.get(key) is recording:
            del self._all[key]
