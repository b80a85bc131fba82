"""Wheels and sdists of all distributions: `python tools/dist.py [--url URL] [--packs DIR]`.

Each distribution is built from a copy of its tracked files. There its README gets absolute links, as package indexes
need them, and its metadata the project's URLs: all begin with the address of the repository, which is that of git's
remote `origin` unless it is given. Without an address, relative links become plain text. Needs the extra `dist`.

The wheel of `llamacli-kernels` has the packs of `tools/kernel_packs.py`, which are built unless a folder has them.
There is no sdist of it: packs are compiled by the core that they are for.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE, PACKS = ROOT / "core", ROOT / "packs"

FILES = ("pyproject.toml", "README.md", "LICENSE")
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:|mailto:|#)([^()\s#]+)(#[^()\s]*)?\)")


def projects() -> list[Path]:
    """Folders of the distributions: all, core, kernels, plugins."""
    return [ROOT, CORE, PACKS, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]


def repository_url(remote: str) -> str:
    """Web address of a git remote, "" for a local one."""
    found = re.fullmatch(r"(?:https?://|ssh://)?(?:[^@/]+@)?([^/:]+\.[^/:]+)[:/](?:\d+/)?(.+?)(?:\.git)?/?", remote)
    return f"https://{found[1]}/{found[2]}" if found else ""


def with_absolute_links(text: str, folder: str, url: str, ref: str) -> str:
    """Text of a page of `folder` with absolute links.

    Relative ones get the address in front. Without an address they become plain text, and images their descriptions.
    """

    def absolute(link: re.Match[str]) -> str:
        mark, label, path, anchor = link[1], link[2], link[3], link[4] or ""
        if not url:
            return label
        place = posixpath.normpath(posixpath.join(folder, path))
        return f"{mark}[{label}]({url}/{'raw' if mark else 'blob'}/{ref}/{place}{anchor})"

    return _LINK.sub(absolute, text)


def project_urls(url: str, ref: str) -> str:
    """Table `project.urls` of a pyproject.toml, "" without an address."""
    if not url:
        return ""
    pages = {
        "Homepage": url,
        "Documentation": f"{url}/tree/{ref}/docs",
        "Changelog": f"{url}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{page}"\n' for name, page in pages.items())


def stage(project: Path, target: Path, url: str, ref: str) -> None:
    """Copy the files of a distribution, with links and URLs.

    The tiny models of a plugin's tests become modules of its package, where `llamacli plugins check` finds them.
    """
    package = next(iter(_packages(project)), "")
    for path in _tracked(project):
        place = path.relative_to(project)
        copy = target / (Path(package, place.name) if place.parts[0] == "tests" else place)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    folder = project.relative_to(ROOT).as_posix()
    readme, table = target / "README.md", target / "pyproject.toml"
    readme.write_text(with_absolute_links(readme.read_text("utf-8"), folder, url, ref), "utf-8")
    table.write_text(table.read_text("utf-8") + project_urls(url, ref), "utf-8")


def _packages(project: Path) -> list[str]:
    """Names of a plugin's packages; an installation leaves `llamacli_NAME.egg-info` beside them."""
    return [path.name for path in project.glob("llamacli_*") if path.name.isidentifier()]


def _tracked(project: Path) -> Iterator[Path]:
    """Files under version control that a distribution needs."""
    packages = ["llamacli"] if project == CORE else [*_packages(project), "tests/tiny_*.py"]
    listed = subprocess.run(
        ["git", "ls-files", "-z", *FILES, *packages], cwd=project, capture_output=True, text=True, check=True
    ).stdout
    yield from (project / name for name in listed.split("\0") if name)


def build(out: Path, url: str, ref: str, chosen: Sequence[Path], packs: Sequence[Path] = ()) -> None:
    """Build wheels and sdists, and check that their metadata renders.

    `packs` are the files of `llamacli-kernels`.
    """
    out.mkdir(parents=True, exist_ok=True)
    for project in chosen:
        with tempfile.TemporaryDirectory() as folder:
            stage(project, Path(folder), url, ref)
            kinds = ("--wheel",) if project == PACKS else ()
            for pack in packs if project == PACKS else ():
                shutil.copy2(pack, Path(folder, "llamacli_kernels"))
            _python("-m", "build", "--no-isolation", *kinds, "--outdir", str(out), folder)
    _python("-m", "twine", "check", "--strict", *map(str, sorted(out.glob("llamacli*"))))


def _python(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def _origin() -> str:
    done = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True, check=False)
    return repository_url(done.stdout.strip())


def main() -> None:
    """Build what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="address of the repository; default: that of git's remote origin")
    parser.add_argument("--ref", default="main", help="branch or tag that links name; default: main")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files; default: dist")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="folder of a plugin, core, packs, or all; default: each"
    )
    parser.add_argument("--packs", type=Path, help="folder of packs; default: all are compiled, which takes long")
    given = parser.parse_args()
    names = {("all" if project == ROOT else project.name): project for project in projects()}
    if unknown := [name for name in given.only or () if name not in names]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(names)}")
    url = _origin() if given.url is None else given.url.rstrip("/")
    if not url:
        print("no address of the repository is known: the metadata will have no URLs; see --url", file=sys.stderr)
    chosen = [names[name] for name in given.only or names]
    with tempfile.TemporaryDirectory() as folder:
        if PACKS in chosen and given.packs is None:
            _python(str(ROOT / "tools/kernel_packs.py"), folder)
        packs = sorted(Path(given.packs or folder).glob("*.pack"))
        build(given.out, url, given.ref, chosen, packs)
    print(f"{len(list(given.out.glob('llamacli*')))} files in {given.out}")


if __name__ == "__main__":
    main()
