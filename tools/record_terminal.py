"""Recording of a terminal as an animated SVG: `python tools/record_terminal.py`.

A shell runs the commands in a pseudo-terminal and in real time; pyte interprets what it writes. Each row of the screen
is a text that is visible for as long as the row did not change. Where animations are off, the last screen is shown.
Writes docs/pictures/terminal.svg. Needs the extra `pictures`.
"""

import html
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

import pyte

PATH = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "terminal.svg"

COMMANDS = (
    "llamacli run demo 'Tell me a story about a fox named Rusty.' --temp 0 -n 75 --stats",
    'llamacli run --temp 0 -p \'Mia found\' --grammar \'root ::= " a " ("key" | "kite") "."\'',
    "llamacli run --temp 0 -n 6 -p 'Once upon a time' --logprobs 3",
)

COLUMNS, ROWS = 86, 22
KEY_S = 0.02
"""Time between two keys in seconds."""

FRAME_S = 0.08
"""Shortest time between two pictures in seconds."""

PAUSE_S = 1.5
"""Time after each command in seconds."""

LIMIT_S = 120
"""Time limit of a command in seconds."""

PROMPT = "$ "
CHARACTER_WIDTH, LINE_HEIGHT, MARGIN = 8.43, 19, 16

COLOURS = {
    "default": "#d8dee9",
    "black": "#4c566a",
    "red": "#e57373",
    "green": "#a3be8c",
    "brown": "#ebcb8b",
    "blue": "#81a1c1",
    "magenta": "#b48ead",
    "cyan": "#88c0d0",
    "white": "#eceff4",
}

_STYLE = "text{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}"


class Version(NamedTuple):
    """Text of a row from `start` to `stop`, in seconds.

    `stop` is None for the last one.
    """

    row: int
    line: str
    start: float
    stop: float | None


class Terminal:
    """Shell in a pseudo-terminal, with its screen."""

    def __init__(self) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.versions: list[Version] = []
        self.shown: dict[int, tuple[str, float]] = {}
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            folder = str(Path(sys.executable).parent)
            path = f"{folder}{os.pathsep}{os.environ['PATH']}"
            os.execvpe("bash", ["bash", "--norc", "--noprofile"], os.environ | {"PS1": PROMPT, "PATH": path})
        ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.started = time.monotonic()
        self.noted = 0.0

    def watch(self, seconds: float) -> None:
        """Read what the shell writes for some time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.fd], [], [], min(left, FRAME_S))[0]:
                self.stream.feed(os.read(self.fd, 65536))
            now = time.monotonic() - self.started
            if now - self.noted >= FRAME_S:
                self._note(now)

    def type(self, command: str) -> None:
        """Type a command and wait until the next prompt."""
        for key in command + "\n":
            os.write(self.fd, key.encode())
            self.watch(KEY_S)
        until = time.monotonic() + LIMIT_S
        while self.screen.display[self.screen.cursor.y].rstrip() != PROMPT.strip():
            if time.monotonic() > until:
                raise TimeoutError(f"{command!r} took more than {LIMIT_S} s")
            self.watch(KEY_S)

    def _note(self, now: float) -> None:
        """Keep the rows that have changed."""
        self.noted = now
        for row in range(ROWS):
            line = _line(self.screen.buffer[row])
            shown, since = self.shown.get(row, ("", now))
            if line != shown:
                if shown:
                    self.versions.append(Version(row, shown, since, now))
                self.shown[row] = line, now

    def close(self) -> tuple[list[Version], float]:
        """End the shell.

        Returns the versions of all rows, and the duration in seconds.
        """
        os.kill(self.pid, signal.SIGHUP)
        os.waitpid(self.pid, 0)
        os.close(self.fd)
        last = [Version(row, line, since, None) for row, (line, since) in self.shown.items() if line]
        return self.versions + last, time.monotonic() - self.started


def _line(cells: "dict[int, pyte.screens.Char]") -> str:
    """Row of the screen as the content of a `<text>`."""
    parts = []
    run, style = "", ""
    for column in range(COLUMNS):
        cell = cells[column]
        colour = COLOURS.get(cell.fg, COLOURS["default"])
        attributes = (f' fill="{colour}"' if cell.fg != "default" else "") + (
            ' font-weight="bold"' if cell.bold else ""
        )
        if attributes != style:
            parts.append(_span(run, style))
            run, style = "", attributes
        run += cell.data
    parts.append(_span(run, style))
    return "".join(parts).rstrip()


def _span(text: str, style: str) -> str:
    text = html.escape(text, quote=False)
    return f"<tspan{style}>{text}</tspan>" if style and text.strip() else text


def drawn(versions: list[Version], duration: float) -> str:
    """Recording as an SVG that repeats after its duration, in seconds."""
    width, height = round(COLUMNS * CHARACTER_WIDTH) + 2 * MARGIN, ROWS * LINE_HEIGHT + 2 * MARGIN
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{_STYLE}text{{fill:{COLOURS['default']}}}.h{{visibility:hidden}}",
        "@media (prefers-reduced-motion:no-preference){",
        f".a{{animation-duration:{duration:.2f}s;animation-iteration-count:infinite;animation-timing-function:step-end}}",
        *_keyframes(versions, duration),
        "}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#242933"/>',
        *_texts(versions),
        "</svg>\n",
    ])  # fmt: skip


def _keyframes(versions: list[Version], duration: float) -> Iterator[str]:
    for number, version in enumerate(versions):
        start = f"{100 * version.start / duration:.2f}%"
        stop = f"{100 * version.stop / duration:.2f}%,to{{visibility:hidden}}" if version.stop else "to{}"
        yield f"@keyframes k{number}{{0%{{visibility:hidden}}{start}{{visibility:visible}}{stop}}}"
        yield f"#t{number}{{animation-name:k{number}}}"


def _texts(versions: list[Version]) -> Iterator[str]:
    for number, version in enumerate(versions):
        y = MARGIN + version.row * LINE_HEIGHT + 14
        kind = "a h" if version.stop else "a"
        yield f'<text id="t{number}" class="{kind}" x="{MARGIN}" y="{y}">{version.line}</text>'


def main() -> None:
    """Record the commands."""
    terminal = Terminal()
    terminal.watch(PAUSE_S)
    for command in COMMANDS:
        terminal.type(command)
        terminal.watch(PAUSE_S)
    terminal.watch(2 * PAUSE_S)
    versions, duration = terminal.close()
    PATH.write_text(drawn(versions, duration), encoding="utf-8")
    print(f"{PATH}: {PATH.stat().st_size} bytes, {len(versions)} rows, {duration:.0f} s")


if __name__ == "__main__":
    main()
