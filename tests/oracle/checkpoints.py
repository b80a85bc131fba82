"""Digests of random checkpoints and adapters as llama.cpp converts them.

Run it from `tests/` with an interpreter that has torch, transformers, sentencepiece and gguf's dependencies, and
`LLAMA_CPP` naming a folder of llama.cpp's source:

    LLAMA_CPP=.../llama.cpp PYTHONPATH=support:. python -m oracle.checkpoints [NAME ...]

The scripts are convert_hf_to_gguf.py and convert_lora_to_gguf.py. The name of the pre-tokenizer, which they find by a
digest of known vocabularies, is given to them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import checkpoint_cases as cases

GOLDENS = Path(__file__).parents[1] / "goldens" / "checkpoints.json"

ADAPTER = "adapter of "
"""Beginning of the names of adapters' results."""

_RUN = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
pre = sys.argv[2]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(name: str, folder: Path, source: Path) -> Path:
    """Convert a case's checkpoint with the peer; path of the GGUF file."""
    case = cases.CASES[name]
    checkpoint, out = cases.write_checkpoint(folder, name), folder / f"{name}.gguf"
    pre = cases.PRE.get(case["tokenizer"], case["tokenizer"])
    script = [f"{source}/convert_hf_to_gguf.py", str(checkpoint), "--outfile", str(out)]
    script += ["--outtype", case["outtype"]] if "outtype" in case else []
    subprocess.run([sys.executable, "-c", _RUN, str(source), pre, *script], check=True, capture_output=True, text=True)
    return out


def convert_adapter(name: str, folder: Path, source: Path) -> Path:
    """Convert a case's adapter with the peer; path of the file."""
    base, out = cases.write_checkpoint(folder, name), folder / "adapter.gguf"
    adapter = cases.write_adapter(folder, name, **cases.ADAPTERS[name])
    script = [f"{source}/convert_lora_to_gguf.py", str(adapter), "--base", str(base), "--outfile", str(out)]
    subprocess.run([sys.executable, "-c", _RUN, str(source), "", *script], check=True, capture_output=True, text=True)
    return out


def main() -> None:
    """Record the digests of all cases, or of those named."""
    source = Path(os.environ["LLAMA_CPP"])
    sys.path.insert(0, f"{source}/gguf-py")
    recorded = json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}
    for name in sys.argv[1:] or [*cases.CASES, *(f"{ADAPTER}{name}" for name in cases.ADAPTERS)]:
        run = convert_adapter if name.startswith(ADAPTER) else convert
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = cases.summary(run(name.removeprefix(ADAPTER), Path(folder), source))
            except subprocess.CalledProcessError as error:
                print(f"{name}: {error.stderr.strip().splitlines()[-1]}")
                continue
        print(f"{name}: {'new' if name not in recorded else 'same' if recorded[name] == found else 'changed'}")
        recorded[name] = found
    GOLDENS.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
