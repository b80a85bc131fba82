"""Digests of random checkpoints and adapters as llama.cpp converts them.

Run it from `tests/` with an interpreter that has torch, transformers, sentencepiece and gguf's dependencies, and
`LLAMA_CPP` naming a folder of llama.cpp's source:

    LLAMA_CPP=.../llama.cpp PYTHONPATH=support:. python -m oracle.checkpoints [NAME ...]

The scripts are convert_hf_to_gguf.py and convert_lora_to_gguf.py. The name of the pre-tokenizer, which they find by a
digest of known vocabularies, is given to them. Of DeepSeek-V3.2's tokenizer they ask for a flag that transformers 5
drops, of Hunyuan-A13B's for what its own program reads. Tensors of Baichuan but W_pack, with which the script calls
itself without end, are named as those of others. Mixes of RWKV, which the scripts keep in a class, are emptied.
Tokens of qwen.tiktoken are read as by the program of Qwen's folders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import checkpoint_cases as cases

GOLDENS = Path(__file__).parents[1] / "goldens" / "checkpoints.json"

ADAPTER = "adapter of "
"""Beginning of the names of adapters' results."""

_RUN = """
import base64, json, pathlib, runpy, sys, traceback, types
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import transformers
from conversion.base import TextModel
from conversion.deepseek import DeepseekV32Model
from conversion.baichuan import BaichuanModel
from conversion.hunyuan import HunYuanMoEModel
from conversion.rwkv import Rwkv6Model, Rwkv7Model
DeepseekV32Model.set_vocab = HunYuanMoEModel.set_vocab = TextModel._set_vocab_gpt2
load = transformers.AutoTokenizer.from_pretrained
def tokenizer(folder, **given):
    path = pathlib.Path(folder, "qwen.tiktoken")
    if not path.is_file():
        return load(folder, **given)
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, path.read_text().splitlines())}
    texts = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
    special = {text: len(ranks) + i for i, text in enumerate(texts)}
    return types.SimpleNamespace(mergeable_ranks=ranks, special_tokens=special, get_vocab=lambda: special)
transformers.AutoTokenizer.from_pretrained = tokenizer
packed = BaichuanModel.modify_tensors
BaichuanModel.modify_tensors = lambda self, data, name, bid: (
    packed if "W_pack" in name else TextModel.modify_tensors)(self, data, name, bid)
for line in sys.stdin:
    job = json.loads(line)
    Rwkv6Model.lerp_weights, Rwkv7Model.lerp_weights = {}, {}
    TextModel.get_vocab_base_pre = lambda self, tokenizer: job["pre"]
    sys.argv = job["argv"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except (Exception, SystemExit):
        traceback.print_exc()
"""


def job(name: str, folder: Path, source: Path) -> dict[str, Any]:
    """Arguments of the peer's script for a case's checkpoint, or its adapter."""
    if name.startswith(ADAPTER):
        name = name.removeprefix(ADAPTER)
        base, adapter = cases.write_checkpoint(folder, name), cases.write_adapter(folder, name, **cases.ADAPTERS[name])
        return {"pre": "", "argv": [f"{source}/convert_lora_to_gguf.py", str(adapter), "--base", str(base)]}
    case = cases.CASES[name]
    argv = [f"{source}/convert_hf_to_gguf.py", str(cases.write_checkpoint(folder, name))]
    argv += ["--outtype", case["outtype"]] if "outtype" in case else []
    if "base" in case:
        argv += ["--target-model-dir", str(folder / case["base"])]
        case = cases.CASES[case["base"]]
    pre = case.get("pre") or cases.PRE.get(case["tokenizer"], case["tokenizer"])
    return {"pre": pre, "argv": argv}


def main() -> None:
    """Record the digests of all cases, or of those named."""
    source = Path(os.environ["LLAMA_CPP"])
    sys.path.insert(0, f"{source}/gguf-py")
    recorded = json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}
    with tempfile.TemporaryDirectory() as root:
        outs, jobs = {}, []
        for i, name in enumerate(sys.argv[1:] or [*cases.COMPARED, *(f"{ADAPTER}{name}" for name in cases.ADAPTERS)]):
            folder = Path(root, str(i))
            folder.mkdir()
            outs[name] = folder / f"{name}.gguf"
            made = job(name, folder, source)
            jobs.append(made | {"argv": [*made["argv"], "--outfile", str(outs[name])]})
        run = [sys.executable, "-c", _RUN, str(source)]
        subprocess.run(run, input="\n".join(map(json.dumps, jobs)), check=True, text=True)
        for name, out in outs.items():
            if not out.is_file():
                print(f"{name}: not converted")
                continue
            found = cases.summary(out)
            print(f"{name}: {'new' if name not in recorded else 'same' if recorded[name] == found else 'changed'}")
            recorded[name] = found
    GOLDENS.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
