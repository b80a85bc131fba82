import importlib.metadata
import inspect
import logging
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from conftest import TinyGguf
from llamacli import (
    InvalidRequestError,
    PluginError,
    SamplingParams,
    TokenizerError,
    UnknownArchitectureError,
    hookspecs,
    load_model,
    load_tokenizer,
)
from llamacli import plugins as plugins_module
from llamacli.checkpoints import Folder
from llamacli.engine import ReferenceEngine
from llamacli.errors import PluginWarning
from llamacli.gguf import Metadata
from llamacli.plugins import ARCHITECTURES, CHECKPOINTS, GENERAL, MEDIA, Plugins, known_architectures
from llamacli.quantization import FORMATS
from llamacli.testing.vocabularies import byte_level
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli.tokenizer.loading import TOKENIZER_MODELS
from llamacli.tokenizer.pretokenizers import PRE_TOKENIZERS

Installed = Callable[..., Plugins]

pytestmark = pytest.mark.filterwarnings("ignore::llamacli.errors.PluginWarning")

HEAD = """
from llamacli import hookimpl
from llamacli.architecture import Architecture
LLAMACLI_API = 1
"""

ARCHITECTURE = (
    HEAD
    + """
class Dummy(Architecture):
    def __init__(self, name):
        self.name = name
    def configure(self, metadata): ...
    def tensors(self, config): ...
    def forward(self, g, config, weights): ...
"""
)


def registering(*names: str) -> str:
    calls = "".join(f"\n    register(Dummy({name!r}))" for name in names)
    return f"{ARCHITECTURE}\n@hookimpl\ndef register_architectures(register):{calls or ' ...'}\n"


def metadata(architecture: str) -> Metadata:
    return Metadata({"general.architecture": architecture}, "model.gguf")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """Install distributions: `install(name=(source, {group: {entry: module}}))`; a source makes module `name`."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(**distributions: tuple[str, dict[str, dict[str, str]]]) -> Plugins:
        for name, (source, groups) in distributions.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
            info = tmp_path / f"{name}-1.5.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
            lines = [
                line
                for group, entries in groups.items()
                for line in (f"[{group}]", *(f"{entry} = {module}" for entry, module in entries.items()))
            ]
            (info / "entry_points.txt").write_text("\n".join(lines))
        return Plugins(
            entry for dist in importlib.metadata.distributions(path=[str(tmp_path)]) for entry in dist.entry_points
        )

    yield install
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


class TestFinding:
    def test_installed_distributions_are_found(self, install: Installed) -> None:
        install(dummy_found=(registering("dummy"), {ARCHITECTURES: {"dummy": "dummy_found"}}))
        assert Plugins().resolve(metadata("dummy")).name == "dummy"

    def test_listing_claims_imports_nothing(self, install: Installed) -> None:
        plugins = install(dummy_lazy=(registering("dummy"), {ARCHITECTURES: {"dummy": "dummy_lazy"}}))
        assert list(plugins.claimed_architectures()) == ["dummy"]
        assert "dummy_lazy" not in sys.modules

    def test_only_the_needed_plugin_is_imported(self, install: Installed) -> None:
        plugins = install(
            dummy_one=(registering("one"), {ARCHITECTURES: {"one": "dummy_one"}}),
            dummy_two=(registering("two"), {ARCHITECTURES: {"two": "dummy_two"}}),
        )
        assert plugins.resolve(metadata("two")).name == "two"
        assert "dummy_one" not in sys.modules

    def test_several_names_of_one_module(self, install: Installed) -> None:
        entries = {"one": "dummy_pair", "two": "dummy_pair"}
        plugins = install(
            dummy_pair=(registering("one", "two"), {ARCHITECTURES: entries, GENERAL: {"x": "dummy_pair"}})
        )
        assert [plugins.resolve(metadata(name)).name for name in ("one", "two", "one")] == ["one", "two", "one"]
        assert [(info.module, info.architectures) for info in plugins.infos()] == [("dummy_pair", ("one", "two"))]

    def test_infos(self, install: Installed) -> None:
        plugins = install(
            dummy_bad=("import nonexistent_module", {GENERAL: {"bad": "dummy_bad"}}),
            dummy_good=(registering("good"), {ARCHITECTURES: {"good": "dummy_good"}}),
        )
        bad, good = plugins.infos()
        assert (good.module, good.distribution, good.version, good.architectures, good.error) == (
            "dummy_good", "dummy_good", "1.5", ("good",), None,
        )  # fmt: skip
        assert (bad.module, bad.architectures) == ("dummy_bad", ())
        assert "dummy_bad (from dummy_bad 1.5)" in bad.error
        assert "ModuleNotFoundError: No module named 'nonexistent_module'" in bad.error


class TestMemory:
    @pytest.mark.every_case
    @pytest.mark.parametrize(
        "error",
        [
            "MemoryError",
            "OSError(12, 'Cannot allocate memory')",
            "SystemError('<built-in function compile> returned NULL without setting an exception')",
        ],
    )
    def test_plugin_without_memory_is_loaded_later(
        self, error: str, install: Installed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plugins = install(
            dummy_full=(
                f"import sys\nif hasattr(sys, 'full'): raise {error}\n{registering('one')}",
                {ARCHITECTURES: {"one": "dummy_full"}},
            )
        )
        monkeypatch.setattr(sys, "full", True, raising=False)
        for load in (plugins.infos, lambda: plugins.load_group(ARCHITECTURES)):
            with pytest.raises(MemoryError, match=r"none to load plugin dummy_full \(from dummy_full 1.5\)"):
                load()
        monkeypatch.delattr(sys, "full")
        assert plugins.resolve(metadata("one")).name == "one"


BROKEN = {
    "import_error": ("import nonexistent_module", "ModuleNotFoundError: No module named 'nonexistent_module'"),
    "exits": ("import sys\nsys.exit('leaving')", "SystemExit: leaving"),
    "ends_python": ("class End(BaseException): pass\nraise End('now')", "End: now"),
    "syntax_error": ("def", "SyntaxError"),
    "raises": ("raise RuntimeError('no CPU')", "RuntimeError: no CPU"),
    "no_version": ("", r"it declares LLAMACLI_API = None; this core has 1"),
    "other_kernels": (
        "LLAMACLI_API = 1\nLLAMACLI_KERNEL_API = 1",
        r"it declares LLAMACLI_KERNEL_API = 1; this core has 2: since 2, `to.step\(.* by name",
    ),
    "gone_name": ("from llamacli.plugin import stride", "ImportError: llamacli.plugin.stride is gone: since 2"),
    "other_version": ("LLAMACLI_API = 2", r"it declares LLAMACLI_API = 2; this core has 1"),
    "misspelt": (
        f"{HEAD}@hookimpl\ndef register_architecture(register): ...",
        "unknown hook 'register_architecture'.*did you mean 'register_architectures'",
    ),
    "wrong_argument": (f"{HEAD}@hookimpl\ndef register_loaders(add): ...", "Argument.* {'add'}"),
    "no_loader": (
        f"{HEAD}@hookimpl\ndef register_loaders(register): register(42)",
        "registers 42: .register. takes Loader objects",
    ),
    "no_architecture": (
        f"{HEAD}@hookimpl\ndef register_architectures(register): register(Architecture)",
        "Architecture.*: .register. takes Architecture objects",
    ),
    "no_sampler": (
        f"{HEAD}@hookimpl\ndef register_samplers(register): register('top_k')",
        "registers 'top_k': .register. takes SamplerType objects",
    ),
    "no_format": (
        f"{HEAD}@hookimpl\ndef register_quant_formats(register): register(None)",
        "registers None: .register. takes QuantFormat objects",
    ),
    "no_chat_format": (
        f"{HEAD}@hookimpl\ndef register_chat_formats(register): register('chatml')",
        "registers 'chatml': .register. takes ChatFormat objects",
    ),
    "hook_raises": (
        f"{HEAD}@hookimpl\ndef register_loaders(register): register.x",
        r"AttributeError: .*, at \S*dummy_hook_raises.py:6",
    ),
    "no_hook": ("LLAMACLI_API = 1\ndef register_loaders(register): ...", "implements no hook; .* @hookimpl"),
}
"""Sources of broken plugins, and the error message of each."""


class TestIsolation:
    """Errors in one plugin do not affect the others."""

    def test_an_interrupt_names_the_plugin(self, install: Installed) -> None:
        plugins = install(dummy_interrupt=("raise KeyboardInterrupt", {ARCHITECTURES: {"one": "dummy_interrupt"}}))
        with pytest.raises(KeyboardInterrupt) as raised:
            plugins.resolve(metadata("one"))
        (note,) = raised.value.__notes__
        assert "while plugin dummy_interrupt (from dummy_interrupt 1.5) was loaded" in note

    def test_a_slow_plugin_is_named(self, install: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plugins_module, "_SLOW_S", -1.0)
        plugins = install(dummy_slow=(registering("one"), {ARCHITECTURES: {"one": "dummy_slow"}}))
        with pytest.warns(PluginWarning, match=r"dummy_slow \(from dummy_slow 1.5\) took [0-9.]+ seconds to load"):
            plugins.resolve(metadata("one"))

    def test_threads_load_a_plugin_once(self, install: Installed) -> None:
        source = "import time\ntime.sleep(0.1)\n" + registering("one")
        plugins = install(dummy_shared=(source, {ARCHITECTURES: {"one": "dummy_shared"}}))
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(plugins.resolve, metadata("one")) for _ in range(4)]
        assert {future.result().name for future in found} == {"one"}

    def test_a_malformed_entry_point(self, install: Installed, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            plugins = install(
                dummy_odd=("", {GENERAL: {"odd": "no module!"}}),
                dummy_even=(registering("even"), {ARCHITECTURES: {"even": "dummy_even"}}),
            )
        assert "entry point odd = 'no module!' of dummy_odd names no module" in caplog.text
        assert plugins.loaders() == []
        assert [info.module for info in plugins.infos()] == ["dummy_even"]

    def test_a_distribution_without_metadata(self, install: Installed, tmp_path: Path) -> None:
        plugins = install(dummy_bare=(registering("bare"), {ARCHITECTURES: {"bare": "dummy_bare"}}))
        (tmp_path / "dummy_bare-1.5.dist-info" / "METADATA").unlink()
        assert [(info.distribution, info.version) for info in plugins.infos()] == [("(unknown)", "")]

    @pytest.mark.parametrize("name", BROKEN)
    def test_a_broken_plugin(self, name: str, install: Installed, caplog: pytest.LogCaptureFixture) -> None:
        source, message = BROKEN[name]
        module = f"dummy_{name}"
        plugins = install(
            **{module: (source, {ARCHITECTURES: {"broken": module}, GENERAL: {"x": module}})},
            dummy_fine=(registering("fine"), {ARCHITECTURES: {"fine": "dummy_fine"}}),
        )
        with caplog.at_level(logging.WARNING):
            assert plugins.loaders() == []
        assert f"plugin {module} (from {module} 1.5) cannot be loaded" in caplog.text
        with pytest.raises(PluginError, match=message) as first:
            plugins.resolve(metadata("broken"))
        with pytest.raises(PluginError) as second:
            plugins.resolve(metadata("broken"))
        assert first.value is second.value
        assert plugins.resolve(metadata("fine")).name == "fine"
        assert {info.module: info.error is None for info in plugins.infos()} == {module: False, "dummy_fine": True}
        assert not any(plugin is sys.modules.get(module) for plugin in plugins._manager.get_plugins())

    @pytest.mark.parametrize("hook", ["match_architecture(metadata)", "model_loaded(model)"])
    def test_failing_hook_is_logged_and_left_out(
        self, hook: str, install: Installed, tiny_gguf: TinyGguf, caplog: pytest.LogCaptureFixture
    ) -> None:
        failing = f"{HEAD}\n@hookimpl\ndef {hook}: raise OSError('disk')\n"
        matching = f"{ARCHITECTURE}\nfrom llamacli_llama import Llama\n@hookimpl\ndef {hook}: return Llama()\n"
        plugins = install(
            dummy_failing=(failing, {GENERAL: {"a": "dummy_failing"}}),
            dummy_working=(matching, {GENERAL: {"z": "dummy_working"}}),
        )
        if hook.startswith("model_loaded"):
            plugins.load(EntryPoint("llama", "llamacli_llama", ARCHITECTURES))
        message = f"{hook.split('(')[0]} of plugin dummy_failing failed: OSError: disk, at .*dummy_failing.py:7"
        with caplog.at_level(logging.WARNING), pytest.warns(PluginWarning, match=message):
            assert load_model(tiny_gguf("gqa"), plugins=plugins, engine=ReferenceEngine()).arch == "llama"
        assert re.search(message, caplog.text)

    def test_failed_registration_is_undone(self, install: Installed) -> None:
        source = registering("half") + "\n@hookimpl\ndef register_loaders(register): raise OSError('disk')\n"
        plugins = install(
            dummy_half=(source, {ARCHITECTURES: {"half": "dummy_half"}}),
            dummy_other=(registering("other"), {GENERAL: {"x": "dummy_other"}}),
        )
        with pytest.raises(PluginError, match="OSError: disk"):
            plugins.resolve(metadata("half"))
        plugins.loaders()
        assert plugins.resolve(metadata("other")).__class__.__module__ == "dummy_other"

    def test_intruder_does_not_replace_the_plugin_that_claims_a_name(self, install: Installed) -> None:
        plugins = install(
            dummy_intruder=(registering("victim"), {GENERAL: {"x": "dummy_intruder"}}),
            dummy_victim=(registering("victim"), {ARCHITECTURES: {"victim": "dummy_victim"}}),
        )
        plugins.loaders()
        assert type(plugins.resolve(metadata("victim"))).__module__ == "dummy_victim"
        intruder, victim = plugins.infos()
        assert "victim, which dummy_victim (from dummy_victim 1.5) claims" in intruder.error
        assert victim.error is None

    def test_contested_names_are_listed_at_all_claimants(self, install: Installed) -> None:
        plugins = install(
            dummy_first=(
                registering("same", "one"),
                dict.fromkeys([ARCHITECTURES], dict.fromkeys(["same", "one"], "dummy_first")),
            ),
            dummy_second=(registering("same"), {ARCHITECTURES: {"same": "dummy_second"}}),
        )
        assert all("'same' is claimed by" in info.error for info in plugins.infos())
        assert plugins.resolve(metadata("one")).name == "one"

    def test_claims_that_are_not_registered_are_listed(self, install: Installed) -> None:
        plugins = install(dummy_empty=(registering("other"), {ARCHITECTURES: {"empty": "dummy_empty"}}))
        (info,) = plugins.infos()
        assert info.error == "it claims architecture 'empty' but registers none of this name; is @hookimpl missing?"
        assert info.brings == {"architectures": ("other",)}

    def test_match_that_is_no_architecture_is_named(self, install: Installed) -> None:
        source = f"{HEAD}\n@hookimpl\ndef match_architecture(metadata): return 'x'\n"
        plugins = install(dummy_text=(source, {GENERAL: {"x": "dummy_text"}}))
        with pytest.raises(PluginError, match="match_architecture of plugin dummy_text returned 'x', expected an Arch"):
            plugins.resolve(metadata("zzz"))

    def test_calls_are_traced(
        self, install: Installed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("LLAMACLI_TRACE_PLUGINS", "1")
        plugins = install(dummy_traced=(registering("traced"), {ARCHITECTURES: {"traced": "dummy_traced"}}))
        plugins.resolve(metadata("traced"))
        line = r"llamacli: register_architectures of dummy_traced\(register\) = \[\] in \d+\.\d ms\n"
        assert re.fullmatch(line, capsys.readouterr().err)


class TestResolving:
    def test_two_plugins_for_one_architecture_raise(self, install: Installed) -> None:
        plugins = install(
            dummy_first=(registering("same"), {ARCHITECTURES: {"same": "dummy_first"}}),
            dummy_second=(registering("same"), {ARCHITECTURES: {"same": "dummy_second"}}),
        )
        with pytest.raises(PluginError, match=r"'same' is claimed by") as raised:
            plugins.resolve(metadata("same"))
        assert "dummy_first (from dummy_first 1.5)" in str(raised.value)
        assert "dummy_second (from dummy_second 1.5)" in str(raised.value)

    def test_duplicate_registration_raises(self, install: Installed) -> None:
        plugins = install(
            dummy_first=(registering("same"), {ARCHITECTURES: {"same": "dummy_first"}}),
            dummy_second=(registering("same"), {ARCHITECTURES: {"other": "dummy_second"}}),
        )
        plugins.resolve(metadata("same"))
        with pytest.raises(PluginError, match="registers what is registered already: same"):
            plugins.resolve(metadata("other"))

    def test_claim_without_registration_raises(self, install: Installed) -> None:
        plugins = install(dummy_empty=(registering(), {ARCHITECTURES: {"empty": "dummy_empty"}}))
        with pytest.raises(PluginError, match="claims architecture 'empty' but registers none of this name"):
            plugins.resolve(metadata("empty"))

    def test_hook_register_architectures_without_a_claim(self, install: Installed) -> None:
        plugins = install(dummy_general=(registering("unclaimed"), {GENERAL: {"x": "dummy_general"}}))
        assert plugins.resolve(metadata("unclaimed")).name == "unclaimed"

    def test_an_unknown_architecture_lists_what_is_installed(self, install: Installed) -> None:
        plugins = install(
            dummy_known=(registering("b", "a"), {ARCHITECTURES: {"b": "dummy_known", "a": "dummy_known"}})
        )
        with pytest.raises(
            UnknownArchitectureError,
            match=r"^model.gguf: .* 'zzz' \(installed: a, b\); to write a plugin",
        ):
            plugins.resolve(metadata("zzz"))
        with pytest.raises(UnknownArchitectureError, match=r"\(installed: none\)"):
            Plugins([]).resolve(metadata("zzz"))

    @pytest.mark.parametrize(
        ("architecture", "distribution"),
        [
            ("llama", "llamacli-llama"),
            ("qwen2", "llamacli-qwen"),
            ("qwen3moe", "llamacli-qwen"),
            ("phi3", "llamacli-phi"),
            ("gemma3", "llamacli-gemma"),
            ("gpt-oss", "llamacli-gptoss"),
            ("rwkv4", None),
            ("unheard", None),
            ("all-minilm", None),
            ("testing", None),
            ("grammarian", None),
            ("qwen2vl", "llamacli-qwen"),
            ("qwen99", None),
            ("phi99", None),
        ],
    )
    def test_unknown_architecture_suggests_a_distribution(self, architecture: str, distribution: str | None) -> None:
        assert known_architectures().get(architecture, {}).get("plugin") == distribution
        with pytest.raises(UnknownArchitectureError) as raised:
            Plugins([]).resolve(metadata(architecture))
        assert (f"pip install {distribution}" in str(raised.value)) == (distribution is not None)

    def test_hook_match_architecture_is_the_last_resort(self, install: Installed) -> None:
        matching = "\n@hookimpl\ndef match_architecture(metadata):\n    "
        plugins = install(
            dummy_no=(ARCHITECTURE + matching + "return None", {GENERAL: {"no": "dummy_no"}}),
            dummy_yes=(
                registering("named")
                + matching
                + "if metadata['general.architecture'].startswith('x'): return Dummy('matched')",
                {ARCHITECTURES: {"named": "dummy_yes"}},
            ),
        )
        assert plugins.resolve(metadata("x1")).name == "matched"
        assert plugins.resolve(metadata("named")).name == "named"
        with pytest.raises(UnknownArchitectureError):
            plugins.resolve(metadata("y1"))


class TestHooks:
    def test_hook_register_media(self, install: Installed) -> None:
        source = f"""{HEAD}
from llamacli_llama.idefics3 import Idefics3
@hookimpl
def register_media(register):
    encoder = Idefics3()
    encoder.name = "dummy-eye"
    register(encoder)
"""
        plugins = install(dummy_eye=(source, {MEDIA: {"dummy-eye": "dummy_eye"}}))
        assert plugins.media_encoder("dummy-eye").name == "dummy-eye"
        assert plugins.infos()[0].brings == {"media encoders": ("dummy-eye",)}
        with pytest.raises(UnknownArchitectureError, match=r"'other' \(installed: dummy-eye\)"):
            plugins.media_encoder("other")

    def test_hook_register_media_of_two_plugins(self, install: Installed) -> None:
        both = {MEDIA: {"same": "dummy_one"}}, {MEDIA: {"same": "dummy_two"}}
        plugins = install(dummy_one=(HEAD, both[0]), dummy_two=(HEAD, both[1]))
        with pytest.raises(PluginError, match=r"'same' is claimed by dummy_\w+ .* and by dummy_"):
            plugins.media_encoder("same")

    def test_hook_register_checkpoints(self, install: Installed, tmp_path: Path) -> None:
        source = f"""{HEAD}
from llamacli.plugin import Checkpoint
@hookimpl
def register_checkpoints(register):
    register(Checkpoint("llama", ("DummyForCausalLM",)))
"""
        groups = {CHECKPOINTS: {"DummyForCausalLM": "dummy_folders"}}
        plugins = install(dummy_folders=(source, groups))
        (tmp_path / "config.json").write_text('{"architectures": ["DummyForCausalLM"]}')
        assert plugins.checkpoint(Folder(tmp_path)).architecture == "llama"
        (tmp_path / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
        with pytest.raises(UnknownArchitectureError, match=r"OtherForCausalLM.*Similar: DummyForCausalLM"):
            plugins.checkpoint(Folder(tmp_path))

    def test_hook_register_pre_tokenizers(self, install: Installed) -> None:
        source = f"""{HEAD}
from llamacli.tokenizer.loading import NamedPreTokenizer
from llamacli.tokenizer.pretokenizers import PreTokenizer
@hookimpl
def register_pre_tokenizers(register):
    register(NamedPreTokenizer("dummy-letters", PreTokenizer((r"\\p{{L}}",))))
"""
        plugins = install(dummy_pre=(source, {GENERAL: {"x": "dummy_pre"}}))
        values = byte_level(["a b"], bos_token_id=256) | {"tokenizer.ggml.pre": "dummy-letters"}
        with pytest.raises(TokenizerError, match="'dummy-letters' is not supported"):
            tokenizer_from_metadata(values)
        try:
            plugins.loaders()
            assert tokenizer_from_metadata(values).encode("ab", add_special=False) == [97, 98]
            assert plugins.infos()[0].brings == {"pre-tokenizers": ("dummy-letters",)}
        finally:
            PRE_TOKENIZERS.pop("dummy-letters", None)

    def test_hook_register_tokenizers(self, install: Installed) -> None:
        source = f"""{HEAD}
from llamacli.tokenizer.loading import TokenizerModel
from llamacli.tokenizer.loading import TokenizerParts
from llamacli.tokenizer.vocabulary import read_vocabulary
class Characters:
    add_space_prefix = False
    def encode(self, text, continues=False):
        return [ord(c) - 97 for c in text]
    def decode(self, text):
        return text.encode()
def make(metadata):
    return TokenizerParts(read_vocabulary(metadata, {{}}), Characters(), False, False)
@hookimpl
def register_tokenizers(register):
    register(TokenizerModel("dummy-characters", make))
"""
        plugins = install(dummy_tokenizer=(source, {GENERAL: {"x": "dummy_tokenizer"}}))
        try:
            plugins.loaders()
            keys = {"tokenizer.ggml.model": "dummy-characters", "tokenizer.ggml.tokens": list("abc")}
            tokenizer = tokenizer_from_metadata(keys)
            assert tokenizer.encode("cab") == [2, 0, 1]
            assert tokenizer.decode([2, 0, 1]) == "cab"
        finally:
            TOKENIZER_MODELS.pop("dummy-characters", None)

    def test_hook_register_loaders(self, install: Installed, tmp_path: Path) -> None:
        source = f"""{HEAD}
from llamacli import ArrayFile, Loader
from llamacli.gguf import Metadata
def opens(path):
    keys = {{"general.architecture": "x", "x.vocab_size": 3}}
    return ArrayFile(path, Metadata(keys), {{}})
@hookimpl
def register_loaders(register):
    register(Loader("dummy", lambda path: path.suffix == ".dummy", opens))
"""
        plugins = install(dummy_loader=(source, {GENERAL: {"x": "dummy_loader"}}))
        assert [loader.name for loader in plugins.loaders()] == ["dummy"]
        path = tmp_path / "a.dummy"
        path.write_bytes(b"...")
        assert load_tokenizer(path, plugins=plugins).n_vocab == 3

    def test_hook_register_chat_formats(self, install: Installed) -> None:
        source = f"""{HEAD}
from llamacli.chat.formats import ChatFormat
@hookimpl
def register_chat_formats(register):
    register(ChatFormat(name="dummy", matches=lambda info: True))
"""
        plugins = install(
            dummy_first=(source, {GENERAL: {"x": "dummy_first"}}),
            dummy_second=(source, {GENERAL: {"y": "dummy_second"}}),
        )
        assert [fmt.name for fmt in plugins.chat_formats()] == ["dummy"]
        errors = {info.module: info.error for info in plugins.infos()}
        assert "registers what is registered already: dummy" in errors["dummy_second"]

    def test_chat_formats_of_a_distribution_and_their_order(self, install: Installed) -> None:
        source = """
from llamacli.chat.formats import ChatFormat
@hookimpl
def register_chat_formats(register):
    register(ChatFormat(name="{}", matches=lambda info: True))
"""
        plugins = install(
            family=(registering("one") + source.format("ours"), {ARCHITECTURES: {"one": "family", "two": "sibling"}}),
            sibling=(registering("two"), {}),
            outside=(HEAD + source.format("theirs"), {GENERAL: {"x": "outside"}}),
        )
        plugins.architecture("two")
        assert [fmt.name for fmt in plugins.chat_formats()] == ["theirs", "ours"]

    def test_hook_register_samplers(self, install: Installed, tiny_gguf: TinyGguf) -> None:
        source = f"""{HEAD}
from llamacli.sampling import Sampler, SamplerType
class Banish(Sampler):
    def __init__(self, token):
        self.token = token
    def apply(self, candidates):
        candidates.keep_where(candidates.ids != self.token)
@hookimpl
def register_samplers(register):
    register(SamplerType("banish", lambda params, tokenizer: Banish(params.options["banish"]), when_greedy=True))
"""
        llama = {ARCHITECTURES: {"llama": "llamacli_llama"}}
        plugins = install(
            dummy_banish=(source, llama | {GENERAL: {"x": "dummy_banish"}}),
            dummy_again=(source.replace('"banish", lambda', '"TOP-K", lambda'), {GENERAL: {"y": "dummy_again"}}),
        )
        model = load_model(tiny_gguf("gqa"), plugins=plugins, engine=ReferenceEngine())
        assert model.added_samplers() == ["banish"]
        session = model.create_session()
        session.eval([1, 2, 3])
        best = session.sample()
        assert session.sample(SamplingParams(samplers=("Banish",), options={"banish": best})) != best
        with pytest.raises(InvalidRequestError, match="unknown sampler 'other'"):
            session.sample(SamplingParams(samplers=("other",)))
        errors = {info.module: info.error for info in plugins.infos()}
        assert "registers what is registered already: TOP-K" in errors["dummy_again"]

    def test_hook_register_quant_formats(self, install: Installed, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
        source = f"""{HEAD}
from enum import IntEnum
import numpy as np
from llamacli.quantization import QuantFormat
class Added(IntEnum):
    NEGATED = 199
def dequantize(raw):
    return -raw.view("<f4")
@hookimpl
def register_quant_formats(register):
    register(QuantFormat(Added.NEGATED, 1, 4, dequantize))
"""
        llama = {ARCHITECTURES: {"llama": "llamacli_llama"}}
        path = tmp_path / "negated.gguf"
        path.write_bytes(with_type(tiny_gguf("gqa").read_bytes(), "output.weight", 199))
        try:
            plugins = install(dummy_format=(source, llama | {GENERAL: {"x": "dummy_format"}}))
            negated, plain = (
                load_model(file, "fp32", plugins=plugins, engine=ReferenceEngine()).create_session()
                for file in (path, tiny_gguf("gqa"))
            )
            assert FORMATS[199].name == "NEGATED"
            negated.eval([1, 2, 3])
            plain.eval([1, 2, 3])
            assert (negated.logits == -plain.logits).all()
            again = install(dummy_twice=(source, {GENERAL: {"y": "dummy_twice"}}))
            errors = {info.module: info.error for info in again.infos()}
            assert errors["dummy_format"] is None, "the same format again is no conflict"
            assert "registers what is registered already: NEGATED" in errors["dummy_twice"]
        finally:
            FORMATS.pop(199, None)

    @pytest.mark.parametrize("group", [GENERAL, ARCHITECTURES])
    def test_hook_model_loaded(self, group: str, install: Installed, tiny_gguf: TinyGguf) -> None:
        source = f"""{HEAD}
seen = []
from llamacli_llama import register_architectures
@hookimpl
def model_loaded(model):
    seen.append(model)
"""
        groups = {ARCHITECTURES: {"llama": "llamacli_llama" if group == GENERAL else "dummy_seeing"}}
        if group == GENERAL:
            groups[GENERAL] = {"x": "dummy_seeing"}
            source = source.replace("from llamacli_llama import register_architectures", "")
        plugins = install(dummy_seeing=(source, groups))
        model = load_model(tiny_gguf("gqa"), plugins=plugins, engine=ReferenceEngine())
        assert sys.modules["dummy_seeing"].seen == [model]


def test_samplers_of_a_module_with_architectures_alone_are_named(install: Installed) -> None:
    source = f"""{HEAD}
from llamacli.plugin import Sampler, SamplerType
from llamacli_llama import Llama
@hookimpl
def register_architectures(register):
    architecture = Llama()
    architecture.name = "dummy"
    register(architecture)
@hookimpl
def register_samplers(register):
    register(SamplerType("dummy", lambda params, tokenizer: Sampler()))
"""
    architectures = {ARCHITECTURES: {"dummy": "dummy_both"}}
    (info,) = (info for info in install(dummy_both=(source, architectures)).infos() if info.module == "dummy_both")
    assert info.error == "its samplers are not found: name dummy_both in the entry-point group 'llamacli' too"
    both = {ARCHITECTURES: {"dummy2": "dummy_two"}, GENERAL: {"x": "dummy_two"}}
    found = install(dummy_two=(source.replace('"dummy"', '"dummy2"'), both)).infos()
    assert [info.error for info in found if info.module == "dummy_two"] == [None]


def test_every_hook_has_a_test() -> None:
    hooks = [name for name, value in vars(hookspecs).items() if hasattr(value, "llamacli_spec")]
    tests = [name for name, _ in inspect.getmembers(TestHooks) + inspect.getmembers(TestResolving)]
    assert len(hooks) == 11
    assert [hook for hook in hooks if not any(name.startswith(f"test_hook_{hook}") for name in tests)] == []


def test_list_of_distributions_is_true() -> None:
    """Run `python tools/list_architectures.py` where this fails."""
    root = Path(__file__).resolve().parents[1]
    assert (root / "core/llamacli/data/architectures.json").read_text() == runpy.run_path(
        str(root / "tools/list_architectures.py")
    )["listed"]()


def with_type(gguf: bytes, name: str, tensor_type: int) -> bytes:
    """Replace the type id of a 2-D tensor."""
    at = gguf.index(len(name).to_bytes(8, "little") + name.encode()) + 8 + len(name) + 4 + 2 * 8
    return gguf[:at] + tensor_type.to_bytes(4, "little") + gguf[at + 4 :]
