"""What a run cost."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from llamacli.cli.output import human_bytes, note

if TYPE_CHECKING:
    from llamacli import Stats


def peak_rss() -> int | None:
    """The most memory that this process has had resident, in bytes; None where the system does not tell."""
    with contextlib.suppress(OSError):  # Linux: getrusage would count what the parent had when it forked
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@attrs.frozen
class Figures:
    """Seconds to load the model, the session's figures, the process's memory at its peak in bytes, and the seed."""

    load_s: float
    session: Stats
    seed: int
    peak_rss: int | None = attrs.field(factory=peak_rss)

    def as_dict(self) -> dict[str, float | int | None]:
        """All figures by name, for JSON."""
        return {"load_s": self.load_s, **attrs.asdict(self.session), "peak_rss": self.peak_rss, "seed": self.seed}

    def print(self) -> None:
        """Show them on stderr."""
        s = self.session
        note(f"load          {self.load_s:.2f} s")
        note(f"prompt        {s.n_prompt} tokens, {s.n_reused} of them reused, {s.prefill_tps:.1f} tok/s")
        note(f"first token   {s.ttft_s * 1000:.0f} ms")
        note(f"generated     {s.n_gen} tokens, {s.gen_tps:.1f} tok/s")
        if self.peak_rss is not None:
            note(f"peak memory   {human_bytes(self.peak_rss)}")
        note(f"seed          {self.seed}")
