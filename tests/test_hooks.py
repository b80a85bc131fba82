"""Pages of docs/hooks: signatures, and examples that run."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import click.testing
import numpy as np
import pytest

from checkpoint_cases import write_checkpoint
from conftest import TinyGguf
from demo_copies import write_demo_without_template
from fake_engine import FakeEngine
from http_server import served
from llamacli import SamplingParams, hookspecs, load_model
from llamacli.chat.formats import choose
from llamacli.chat.messages import ToolCall
from llamacli.conversion import file_type, plan, write
from llamacli.engine import Engine, QuantMode, ReferenceEngine
from llamacli.gguf import Metadata, open_gguf
from llamacli.kv import KVType
from llamacli.media.encoder import Tile, compile_encoder
from llamacli.media.pictures import Picture
from llamacli.plugins import ARCHITECTURES, GENERAL, KINDS, Plugins
from llamacli.quantization import FORMATS
from llamacli.testing import check_op, checks_of, write_architecture
from llamacli.testing.formulas import nmse
from llamacli.testing.tiny_media import drawn
from llamacli.testing.vocabularies import byte_level
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli.tokenizer.loading import TOKENIZER_MODELS
from llamacli.tokenizer.pretokenizers import PRE_TOKENIZERS
from media_cases import write_mmproj
from verbs import Run

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "hooks").glob("*.md"))}

HOOK_OF = {
    "architecture": "register_architectures",
    "chat_format": "register_chat_formats",
    "checkpoint": "register_checkpoints",
    "loader": "register_loaders",
    "match_architecture": "match_architecture",
    "media": "register_media",
    "model_loaded": "model_loaded",
    "pre_tokenizer": "register_pre_tokenizers",
    "sampler": "register_samplers",
    "tensor_type": "register_quant_formats",
    "tokenizer": "register_tokenizers",
}
"""Hook of each page."""

OTHERS = {"api", "command", "verb", "verb_with_cache", "verb_with_state", "rope"}
"""Entry points, and classes that a plugin derives from."""

Use = Callable[[str], tuple[ModuleType, Plugins]]


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Install a page's example, beside the Llama plugin."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []
    tables: list[dict[Any, Any]] = [FORMATS, PRE_TOKENIZERS, TOKENIZER_MODELS]  # plugins extend them
    before = [dict(table) for table in tables]

    def example(page: str) -> tuple[ModuleType, Plugins]:
        (source,) = re.findall(r"^```python\n(.*?)^```", PAGES[page], re.M | re.S)
        name = f"llamacli_page_{page}"
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        entries = [EntryPoint("llama", "llamacli_llama", ARCHITECTURES)]
        if "LLAMACLI_API" in source:
            entries.append(EntryPoint("page", name, GENERAL))
        plugins = Plugins(entries)
        if "LLAMACLI_API" in source:
            plugins.load(entries[-1])
        __import__(name)
        return sys.modules[name], plugins

    yield example
    for name in made:
        sys.modules.pop(name, None)
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


def test_every_hook_has_a_page_with_its_signature() -> None:
    hooks = {name: value for name, value in vars(hookspecs).items() if hasattr(value, "llamacli_spec")}
    assert sorted(HOOK_OF.values()) == sorted(hooks)
    assert {*HOOK_OF, *OTHERS} == set(PAGES)
    assert {kind.hook for kind in KINDS} <= set(hooks)
    for page, hook in HOOK_OF.items():
        signature = f"{hook}{inspect.signature(hooks[hook])}".replace("'", "")
        assert f"\n    {signature}\n" in PAGES[page], f"docs/hooks/{page}.md needs the line {signature!r}"


def test_every_page_has_one_example_and_a_test() -> None:
    for page, text in PAGES.items():
        assert len(re.findall(r"^```python$", text, re.M)) == 1, page
        assert f"test_{page}" in globals(), page


def test_the_guide_links_every_page() -> None:
    guide = (ROOT / "docs" / "plugins.md").read_text()
    assert [page for page in PAGES if f"(hooks/{page}.md)" not in guide] == []


def test_architecture(use: Use) -> None:
    module, plugins = use("architecture")
    architecture = plugins.resolve(Metadata({"general.architecture": "bigram"}))
    assert type(architecture) is module.Bigram
    for check in checks_of(architecture):
        if check.name in ("tables", "keys", "tensors", "parameters", "mode_fp32") and check.scope != "others":
            check()


def test_verb(use: Use) -> None:
    module, _ = use("verb")
    check_op(module.Relu6)


def test_verb_with_state(use: Use) -> None:
    module, _ = use("verb_with_state")
    check_op(module.MovingSum)
    assert re.fullmatch(r"recurrent_moving_sum_[0-9a-f]{16}", module.moving_sum_kernel().name)


def test_verb_with_cache(use: Use) -> None:
    module, _ = use("verb_with_cache")
    check_op(module.SigmoidAttention)
    assert re.fullmatch(r"cached_sigmoid_attention_f16_[0-9a-f]{16}", module.sigmoid_kernel()(KVType.of("f16")).name)


def test_rope(use: Use, engine: Engine) -> None:
    module, _ = use("rope")
    rope = module.PartialRope(16, interleaved=True)
    run = Run(engine, lambda g, param, x: g.rope(x, rope, 16))
    cos, sin = rope.table(range(len(run.tokens)))
    assert (sin[:, -1] == 0).all()
    assert (sin[1:, 0] != 0).all()
    pairs = run.x.reshape(len(run.tokens), -1, 8, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * (cos + 1j * sin)[:, None].astype(complex)
    run.check(np.stack([turned.real, turned.imag], -1).reshape(run.x.shape), 1e-10)


def test_chat_format(use: Use) -> None:
    _, plugins = use("chat_format")
    metadata = Metadata({"general.architecture": "bigram", **byte_level(["a b"], bos_token_id=256)})
    fmt = choose(metadata, tokenizer_from_metadata(metadata), plugins.chat_formats())
    assert fmt.name == "speakers"
    reader = fmt.syntax.reader("", tools=False)
    assert [event.text for event in reader.feed("(thinks)why(says)so") + reader.flush()] == ["why", "so"]
    reader = fmt.syntax.reader("", tools=True)
    events = reader.feed("So: <call=f>\n<value=x>1</value>\n</call><call=g>\n</call>") + reader.flush()
    calls = [(event.name, event.arguments) for event in events if isinstance(event, ToolCall)]
    assert calls == [("f", {"x": 1}), ("g", {})]


def test_pre_tokenizer(use: Use) -> None:
    use("pre_tokenizer")
    keys = byte_level(["a b"], bos_token_id=256) | {"tokenizer.ggml.pre": "single-digits"}
    assert tokenizer_from_metadata(keys).encode("12 a", add_special=False) == [49, 50, 32, 97]


def test_tokenizer(use: Use) -> None:
    use("tokenizer")
    keys = {"tokenizer.ggml.model": "characters", "tokenizer.ggml.tokens": list("abc")}
    tokenizer = tokenizer_from_metadata(keys)
    assert tokenizer.encode("cab") == [2, 0, 1]
    assert tokenizer.decode([2, 0, 1]) == "cab"


def test_tensor_type(use: Use, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    module, plugins = use("tensor_type")
    with open_gguf(tiny_gguf("gqa")) as file:
        write(plan(file, file_type("sign"), pure=True), tmp_path / "sign.gguf", threads=1)
        original = file.tensor("output.weight")
    with open_gguf(tmp_path / "sign.gguf") as file:
        assert file.tensors["output.weight"].type == module.Added.SIGN
        assert 0.3 < nmse(file.tensor("output.weight"), original) < 0.4  # 1 - 2 / pi of a normal distribution
    with load_model(tmp_path / "sign.gguf", "fp32", plugins=plugins, engine=ReferenceEngine()) as model:
        session = model.create_session()
        session.eval([1, 2, 3])
        assert np.isfinite(session.logits).all()


def test_sampler(use: Use, tiny_gguf: TinyGguf) -> None:
    _, plugins = use("sampler")
    session = load_model(tiny_gguf("gqa"), plugins=plugins, engine=ReferenceEngine()).create_session()
    session.eval([1, 2, 3])
    session.logits = np.arange(128, dtype=np.float32)
    assert (session.sample(), session.sample(SamplingParams(samplers=("only-even",)))) == (127, 126)


def test_loader(use: Use, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    _, plugins = use("loader")
    with open_gguf(tiny_gguf("gqa")) as file:
        keys = {key: file.metadata[key] for key in file.metadata if key.startswith(("general.", "llama.", "tokenizer"))}
        tensors = {name: file.tensor(name).tolist() for name in file.tensors}
    path = tmp_path / "model.json"
    path.write_text(
        json.dumps(
            {"keys": keys, "tensors": tensors},
            default=lambda value: value.tolist() if hasattr(value, "tolist") else list(value),
        )
    )
    logits = []
    for source in (path, tiny_gguf("gqa")):
        with load_model(source, "fp32", plugins=plugins, engine=ReferenceEngine()) as model:
            logits.append(model.create_session().eval([1, 2, 3], all_logits=True))
    np.testing.assert_array_equal(*logits)


def test_checkpoint(use: Use, tmp_path: Path) -> None:
    module, plugins = use("checkpoint")
    folder = write_checkpoint(tmp_path, "llama")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "AddedForCausalLM"))
    with load_model(folder, plugins=plugins, engine=ReferenceEngine()) as model:
        assert model.arch == module.ADDED.architecture == "llama"
        assert model.metadata["llama.rope.dimension_count"] == 16


def test_media(use: Use, tmp_path: Path) -> None:
    module, plugins = use("media")
    encoder = plugins.media_encoder("square")
    assert type(encoder) is module.Square
    path = write_mmproj(tmp_path / "mmproj.gguf", "idefics3", **{"clip.projector_type": "square"})
    with contextlib.closing(open_gguf(path)) as file:
        loaded = compile_encoder(encoder, file, QuantMode.FP32, ReferenceEngine())
    before, tile, after = loaded.layout(Picture.of(drawn(50, 20)))
    assert (before, after) == ("<image>", "</image>")
    assert isinstance(tile, Tile)
    assert loaded.encode(tile).shape == (4, 64)


@pytest.mark.medium
def test_api(use: Use, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, plugins = use("api")
    module.FAULTY = [module.ROUTES[0]]
    info = tmp_path / "llamacli_page_api-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llamacli-page-api\nVersion: 1\n")
    names = ("page:ROUTES", "taken:FAULTY", "missing:NOTHING", "other:__name__")
    entries = [f"{name.partition(':')[0]} = llamacli_page_api:{name.partition(':')[2]}" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[llamacli.apis]", *entries]))
    model = load_model(write_demo_without_template(tmp_path), plugins=plugins, engine=ReferenceEngine())
    with served(FakeEngine(model)) as http:
        assert http.send("/telegram", {"text": "hi", "urgent": True}).json == {"text": "ONE TWO THREE STOP"}
        assert http.send("/telegram", {}).json == {"text": "SORRY STOP text: it is required"}
        reply = http.send("/telegram", {"text": "hi", "language": "fr"})
        assert (reply.status, "the model decides" in reply.json["text"]) == (400, True)
        assert "/telegram" in http.send("/openapi.json").json["paths"]
        assert 'endpoint="/telegram"' in http.send("/metrics").body.decode()
    for name in ("taken", "missing", "other"):
        assert f"the API {name} of llamacli_page_api" in caplog.text


def test_command(use: Use) -> None:
    module, _ = use("command")
    assert click.testing.CliRunner().invoke(module.shout, ["hello"]).output == "HELLO\n"


def test_match_architecture(use: Use, tmp_path: Path) -> None:
    module, plugins = use("match_architecture")
    architecture = module.Constant()
    path = write_architecture(tmp_path / "a.gguf", architecture=architecture)
    assert path.is_file()
    other = module.Constant()
    other.name = "constant-2"
    path = write_architecture(tmp_path / "b.gguf", architecture=other)
    with load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine()) as model:
        assert model.arch == "constant-2"


def test_model_loaded(use: Use, tiny_gguf: TinyGguf) -> None:
    module, plugins = use("model_loaded")
    load_model(tiny_gguf("gqa"), plugins=plugins, engine=ReferenceEngine()).close()
    assert module.names == ["tiny llama"]
