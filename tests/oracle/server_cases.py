"""Run llama-server's own tests against `llamacli serve`: `python -m oracle.server_cases LLAMA_CPP MODEL [OPTIONS]`.

LLAMA_CPP is the folder of llama.cpp's sources, whose `tools/server/tests` are run as they are, and MODEL the file
stories260K.gguf, with whose tokens they count. Needs pytest, requests, openai, aiohttp, filelock, wget and
prometheus-client. OPTIONS go to pytest, such as `unit/test_basic.py -k load`. Nothing of the tests is kept here.

What they start as llama-server is a fork of this process, which has imported the server, with translated options.
Models are stand-ins: copies of MODEL with ChatML, FIM tokens, or experts, and random encoders of texts and of pictures,
which are drawn. Tests that need words of other models, or other hosts, fail.
"""

import argparse
import importlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import gguf
from gguf import GGMLQuantizationType as Type
from llamacli import cli
from llamacli.testing.models import write_gguf, write_model
from llamacli.testing.vocabularies import word_piece

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from adapters import write_adapter
from llamacli.testing.tiny_media import drawn
from media_cases import write_mmproj

TESTS = "tools/server/tests"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIM = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("fim_pre", "fim_suf", "fim_mid", "fim_rep"), 400)}
HUB = {
    "ggml-org/tinygemma3-GGUF:Q8_0": "sees",
    "ggml-org/test-model-stories260K:F32": "chat",
    "ggml-org/test-model-stories260K-infill:F32": "infill",
}
"""Models of a router, with their stand-ins."""
STAND_INS = {
    "tinygemma3": "sees",
    "infill": "infill",
    "stories15M": "chat",
    "MOE": "experts",
    "bert": "bert",
    "jina": "reranker",
}
"""Stand-ins by part of a model's name, `chat` for others."""
SHARED = {
    "--host", "--port", "--temp", "--seed", "--api-key", "--pooling", "--models-max", "--slot-save-path", "--lora",
    "--chat-template", "--chat-template-file", "--threads", "--no-models-autoload", "--reranking", "--slots",
    "--media-path", "--tags",
    "-ctk", "-ctv",
}  # fmt: skip
"""Options that both have."""
RENAMED = {
    "--sleep-idle-seconds": "--idle-unload",
    "--n-predict": "--max-tokens",
    "--model-draft": "--draft",
    "--spec-draft-n-max": "--draft-max",
    "--no-ui": "--no-page",
    "--verbose": "--log-texts",
    "--mcp-servers-config": "--mcp",
}
WITHOUT_VALUE = {
    "--offline", "--cont-batching", "--embedding", "--reranking", "--metrics", "--kv-unified", "--swa-full", "--slots",
    "--no-slots", "--verbose", "--context-shift", "--no-ui", "--no-models-autoload", "--jinja", "--no-jinja",
    "--no-mmproj", "--no-cache-idle-slots", "--ui-mcp-proxy", "--backend_sampling",
}  # fmt: skip


def write_models(folder: Path, model: Path, texts: str) -> None:
    """Write the stand-ins; encoders know the words of texts."""
    reader = gguf.GGUFReader(model)
    keys: dict[str, Any] = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith(("GGUF.", "general.arch"))
    }
    keys["tokenizer.chat_template"] = CHATML
    tensors = {one.name: (np.array(one.data), one.tensor_type) for one in reader.tensors}
    write_gguf(folder / "chat.gguf", "llama", keys, tensors)
    write_gguf(folder / "infill.gguf", "llama", keys | FIM, tensors)
    write_gguf(folder / "experts.gguf", "llama", keys | _N_EXPERTS, dict(_with_experts(tensors)))
    write_gguf(folder / "sees.gguf", "llama", keys, tensors)
    (folder / "encoder").mkdir()  # beside the models it would be that of all
    write_mmproj(folder / "encoder" / "mmproj.gguf", "llava", keys={"image_size": 64})
    write_adapter(folder / "lora.gguf", folder / "experts.gguf", chosen=lambda name: "attn" in name)
    words = sorted(set(re.findall("[a-z]+", texts.lower())))
    _write_encoder(folder / "bert.gguf", words, "cls", {})
    _write_encoder(folder / "reranker.gguf", words, "rank", {"cls.weight": (1, 64), "cls.bias": (1,)})


_N_EXPERTS = {"llama.expert_count": 4, "llama.expert_used_count": 2}
_POOLING = {"cls": 2, "rank": 4}


def _with_experts(tensors: dict[str, tuple[np.ndarray, Type]]) -> Iterator[tuple[str, tuple[np.ndarray, Type]]]:
    """Tensors with four equal experts, which write the same text."""
    for name, (data, stored) in tensors.items():
        if ".ffn_" not in name or "norm" in name:
            yield name, (data, stored)
            continue
        yield name.replace(".weight", "_exps.weight"), (np.stack([data] * 4), stored)
        if "ffn_gate" in name:
            router = np.zeros((4, data.shape[1]), np.float32)
            yield name.replace("ffn_gate", "ffn_gate_inp"), (router, Type.F32)


def _write_encoder(path: Path, words: list[str], pooling: str, head: dict[str, tuple[int, ...]]) -> None:
    """Write a random BERT that reads unknown words by characters."""
    characters = [chr(code) for code in range(33, 127) if not 65 <= code <= 90]
    pieces = dict.fromkeys([*(f"\u2581{word}" for word in (*characters, *words)), *characters])
    vocabulary = word_piece([*pieces])
    n_embd, n_ff, n_positions = 64, 96, 512
    n_vocab = len(vocabulary["tokenizer.ggml.tokens"])
    numbers = {
        "context_length": n_positions, "embedding_length": n_embd, "feed_forward_length": n_ff, "block_count": 2,
        "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-12, "attention.causal": False,
        "pooling_type": _POOLING[pooling], "vocab_size": n_vocab,
    }  # fmt: skip
    rows = {"attn_q": n_embd, "attn_k": n_embd, "attn_v": n_embd, "attn_output": n_embd, "ffn_up": n_ff}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n_embd),
        "token_types.weight": (2, n_embd),
        "position_embd.weight": (n_positions, n_embd),
        "token_embd_norm.weight": (n_embd,),
        "token_embd_norm.bias": (n_embd,),
        **head,
    }
    for i in range(2):
        for name, n_out in rows.items():
            shapes |= {f"blk.{i}.{name}.weight": (n_out, n_embd), f"blk.{i}.{name}.bias": (n_out,)}
        shapes |= {f"blk.{i}.ffn_down.weight": (n_embd, n_ff), f"blk.{i}.ffn_down.bias": (n_embd,)}
        for norm in ("attn_output_norm", "layer_output_norm"):
            shapes |= {f"blk.{i}.{norm}.weight": (n_embd,), f"blk.{i}.{norm}.bias": (n_embd,)}
    keys = {f"bert.{name}": value for name, value in numbers.items()} | {"tokenizer.ggml.token_type_count": 2}
    vocabulary["tokenizer.ggml.token_type"] = vocabulary["tokenizer.ggml.token_type"].tolist()
    write_model(path, "bert", keys, shapes, seed="bert", metadata={**vocabulary, "tokenizer.ggml.scores": None})


def translated(arguments: list[str], models: Path) -> list[str]:
    """Options of `llamacli serve` for those of llama-server."""
    given: dict[str, list[str]] = {}
    rest = iter(arguments)
    for option in rest:
        given.setdefault(option, []).append("" if option in WITHOUT_VALUE else next(rest))
    options = ["--kv-memory", "256M", "--allowed-host", "*"]
    names = [*given.get("--hf-repo", []), *given.get("--hf-file", [])]
    if files := given.get("--model") or names:
        stand_in = next((there for part, there in STAND_INS.items() if any(part in name for name in files)), "chat")
        alias, *others = given.get("--alias", [stand_in])[0].split(",")
        options += [f"{alias}={models / stand_in}.gguf", "--any-model"]
        options += [part for other in others for part in ("--alias", other)]
        if stand_in == "sees" and "--no-mmproj" not in given:
            options += ["--mmproj", str(models / "encoder" / "mmproj.gguf")]
    else:
        options += [f"{name}={models / there}.gguf" for name, there in HUB.items()]
    n_parallel = int(given.get("--parallel", ["1"])[0])
    if "--ctx-size" in given:
        n_ctx = int(given["--ctx-size"][0])
        options += ["-c", str(n_ctx if "--kv-unified" in given else n_ctx // n_parallel)]
    options += ["--max-running", str(n_parallel)] if "--parallel" in given else []
    if reasoning := given.get("--reasoning"):
        options += ["--no-reasoning"] if reasoning == ["off"] else ["--reasoning"]
    if "--metrics" in given:
        options += ["--llamacpp-metrics"]
    else:
        options += ["--no-metrics"]
    with_tools = given.keys() & {"--tools", "--mcp-servers-config", "--mcp-servers-json"}
    for origin in given.get("--cors-origins", ["localhost" if with_tools else "*"])[0].split(","):
        options += ["--cors-origin", origin]
    if "--mcp-servers-json" in given:
        (models / "mcp.json").write_text(given["--mcp-servers-json"][0])
        options += ["--mcp", str(models / "mcp.json")]
    for name, values in given.items():
        for value in values if name in SHARED | set(RENAMED) else []:
            options += [RENAMED.get(name, name), *([value] if name not in WITHOUT_VALUE else [])]
    return options


class Server:
    """Fork that serves, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, arguments: list[str], *, stdout: Any, env: dict[str, str], **_: Any):
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            for descriptor in (1, 2):
                os.dup2(stdout.fileno(), descriptor)
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
            os.environ.update(env)
            sys.argv = ["llamacli", "serve", *translated(arguments[1:], Path(env["STAND_INS"]))]
            cli.main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def poll(self) -> int | None:
        """Status if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Wait for its end; raises TimeoutExpired."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("llamacli serve", timeout)
            time.sleep(0.02)

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def pytest_configure(config: Any) -> None:
    """Start forks with the stand-ins.

    Names of headers are compared without their case, as HTTP has it.
    """
    sys.path.insert(0, str(config.rootpath))
    requests, utils = map(importlib.import_module, ("requests", "utils"))
    for module in ("llamacli_llama", "llamacli_bert", "llamacli.serve.engine", "llamacli.serve.http.server", "uvicorn"):
        importlib.import_module(module)
    popen = types.ModuleType("subprocess")
    vars(popen).update(vars(subprocess), Popen=Server)
    utils.subprocess = popen

    def stand_in(url: str, output_file_path: str | None = None) -> str:
        return str(Path(os.environ["STAND_INS"], "lora.gguf" if "shakespeare" in url else "chat.gguf"))

    request = utils.ServerProcess.make_request

    def make_request(*args: Any, **kwargs: Any) -> Any:
        response = request(*args, **kwargs)
        response.headers = requests.structures.CaseInsensitiveDict(response.headers)
        return response

    get = requests.get

    def picture(url: str, **options: Any) -> Any:
        if not url.endswith(".png"):
            return get(url, **options)
        response, file = requests.Response(), io.BytesIO()
        Image.fromarray(drawn(32, 32, seed=len(url))).save(file, "png")
        response.status_code, response._content = 200, file.getvalue()
        return response

    requests.get = picture
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.download_file = stand_in
    utils.ServerProcess.make_request = make_request


def main() -> int:
    """Run pytest on a copy of the tests; returns its status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("model", type=Path)
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary, socket.socket() as free:
        folder, models = Path(temporary) / TESTS, Path(temporary) / "stand_ins"
        shutil.copytree(options.llama_cpp / TESTS, folder)
        (Path(temporary) / "models").symlink_to((options.llama_cpp / "models").resolve())
        (folder.parents[1] / "mtmd").mkdir()
        shutil.copy(options.llama_cpp / "tools/mtmd/test-1.jpeg", folder.parents[1] / "mtmd")
        models.mkdir()
        texts = ((folder / "unit" / f"test_{name}.py").read_text() for name in ("embedding", "rerank"))
        write_models(models, options.model, " ".join(texts))
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        here = Path(__file__).resolve().parents[1]
        environment = os.environ | {
            "PORT": str(port),
            "STAND_INS": str(models),
            "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "pytest", "-p", "oracle.server_cases", "-m", "not slow", "--tb=short", *rest]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
