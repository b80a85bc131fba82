"""Statistics of a run: times, speeds, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from llamacli.cli.output import human_bytes, note
from llamacli.util.system import peak_rss

if TYPE_CHECKING:
    from llamacli import Stats


@attrs.frozen
class RunStats:
    """Statistics of a process: load time, session, seed, memory.

    `load_s` is in seconds, `peak_rss` in bytes. `numpy_shares` are the shares of the computing time, from 0 to 1, that
    verbs without a kernel took.
    """

    load_s: float
    session: Stats
    seed: int
    numpy_shares: dict[str, float] = attrs.field(factory=dict)
    peak_rss: int | None = attrs.field(factory=peak_rss)

    def as_dict(self) -> dict[str, float | int | None]:
        """The statistics as a flat dict, for JSON."""
        return attrs.asdict(self, filter=lambda field, _: field.name != "session") | attrs.asdict(self.session)

    def print(self) -> None:
        """Print them to stderr."""
        s = self.session
        note(f"load          {self.load_s:.2f} s")
        note(f"prompt        {s.n_prompt} tokens, {s.n_reused} of them reused, {s.prefill_tps:.1f} tok/s")
        note(f"first token   {s.ttft_s * 1000:.0f} ms")
        note(f"generated     {s.n_gen} tokens, {s.gen_tps:.1f} tok/s")
        if s.n_drafted:
            note(f"drafted       {s.n_drafted} tokens, {s.n_accepted} of them accepted")
        for verb in sorted({op.partition(",")[0] for op in self.numpy_shares}):
            share = sum(share for op, share in self.numpy_shares.items() if op.startswith(f"{verb},"))
            note(f"NumPy         {share:.1%} of the time: {verb} has no kernel")
        if self.peak_rss is not None:
            note(f"peak memory   {human_bytes(self.peak_rss)}")
        note(f"seed          {self.seed}")
