"""Arrays of mapped memory: huge pages, and pages that are given back."""

from pathlib import Path

import pytest

from llamacli.util.memory import anonymous, huge_share

SMAPS = """{start:x}-{stop:x} r--s 00000000 fe:00 123 /cache/packed/a.packed
Size:             262144 kB
Rss:              262144 kB
FilePmdMapped:    {kb} kB
7f7636500000-7f7646500000 r--s 00000000 fe:00 124 /other
FilePmdMapped:    262144 kB
"""


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.0])
def test_huge_pages_of_a_mapped_file(share: float, tmp_path: Path) -> None:
    data = anonymous(32 << 20)
    start, kb = data.ctypes.data, int(share * len(data)) >> 10
    (maps := tmp_path / "smaps").write_text(SMAPS.format(start=start, stop=start + len(data), kb=kb))
    assert huge_share(data, maps) == share
    assert not huge_share(data[4096:], maps), "not the start of a mapping"
    assert not huge_share(data, tmp_path / "none")
