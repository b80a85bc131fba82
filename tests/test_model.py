import gc
import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest

import tiny_llama
from conftest import LoadTiny, TinyGguf
from llamacli import (
    ClosedError,
    InvalidRequestError,
    Model,
    ModelFormatError,
    PluginError,
    QuantMode,
    TokenizerError,
    hookimpl,
    load_model,
    load_tokenizer,
)
from llamacli.architecture import Architecture
from llamacli.engine import Engine, ReferenceEngine
from llamacli.gguf import open_gguf
from llamacli.plugins import ARCHITECTURES, Plugins

STATM, SMAPS = Path("/proc/self/statm"), Path("/proc/self/smaps_rollup")

LOADING = """
import gc, json, re, sys, threading
gc.disable()
import llamacli

def sizes():
    text = open("/proc/self/smaps_rollup").read() + open("/proc/self/status").read()
    names = {"Rss": "Rss", "Anonymous": "Anonymous", "peak": "VmHWM"}
    return {name: 1024 * int(re.search(rf"^{key}:\\s*(\\d+) kB", text, re.MULTILINE)[1]) for name, key in names.items()}

for path in sys.argv[1:] + sys.argv[2:] * 3:
    open("/proc/self/clear_refs", "w").write("5")
    with llamacli.load_model(path, threads=2) as model:
        peak = sizes()["peak"]
        with model.create_session() as session:
            for token in session.generate([1, 2, 3], max_tokens=4, ignore_eos=True):
                pass
    print(json.dumps(sizes() | {"peak": peak}))
"""
"""Load files one after another, the last four times; print sizes in bytes after each."""


def plugin_of(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """Plugin in a new module that registers one architecture."""
    module = ModuleType("test_plugin_module")
    module.LLAMACLI_API = 1
    module.register_architectures = hookimpl(lambda register: register(architecture))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Plugins([EntryPoint(architecture.name, module.__name__, ARCHITECTURES)])


class TestLoading:
    def test_attributes(self, load_tiny: LoadTiny) -> None:
        model = load_tiny("gqa", "auto")
        assert (model.arch, model.mode) == ("llama", QuantMode.AUTO)
        assert (model.config.n_layer, model.config.n_head, model.config.n_head_kv, model.config.n_ctx) == (
            2,
            4,
            2,
            256,
        )
        assert model.metadata["general.name"] == "tiny llama"
        assert repr(model) == "<Model 'tiny llama', llama, 2 layers, a context of 256 tokens, mode auto>"
        model.close()
        assert repr(model) == "<Model 'tiny llama', llama, 2 layers, a context of 256 tokens, mode auto, closed>"

    def test_from_pretrained(self, tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tiny_gguf("gqa")
        monkeypatch.setattr("llamacli.hub.names.cached", lambda found: {"user/repo:Q8_0": path}[str(found)])
        for name in ("user/repo:Q8_0", str(path)):
            with Model.from_pretrained(name, "fp32", plugins=plugins, engine=ReferenceEngine()) as model:
                assert (model.arch, model.mode) == ("llama", QuantMode.FP32)

    def test_only_seq_len_can_be_set(self, load_tiny: LoadTiny) -> None:
        config = load_tiny().config
        config.n_ctx = 17
        for field in attrs.fields(type(config)):
            if field.name != "n_ctx":
                with pytest.raises(attrs.exceptions.FrozenAttributeError):
                    setattr(config, field.name, getattr(config, field.name))
        assert config.n_ctx == 17

    @pytest.mark.parametrize("mode", [*QuantMode, "auto", "fp32", "q8", "q4"])
    def test_modes(self, mode: str, load_tiny: LoadTiny) -> None:
        assert load_tiny("gqa", mode).mode == mode

    @pytest.mark.parametrize("mode", ["int8", "", None, 8])
    def test_unknown_mode(self, mode: Any, load_tiny: LoadTiny) -> None:
        with pytest.raises(InvalidRequestError, match="is not one of auto, fp32, q8, q4"):
            load_tiny("gqa", mode)

    def test_results_do_not_depend_on_threads(self, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
        logits = []
        for threads in (1, 2):
            with load_model(tiny_gguf("gqa"), threads=threads, plugins=plugins) as model:
                logits.append(model.create_session().eval(list(range(40)), all_logits=True))
        np.testing.assert_array_equal(*logits)

    def test_file_can_be_deleted_after_loading(self, tiny_gguf: TinyGguf, plugins: Plugins, engine: Engine) -> None:
        path = tiny_llama.write_llama(tiny_gguf("gqa").with_name("removed.gguf"))
        model = load_model(path, "auto", plugins=plugins, engine=engine)
        path.unlink()
        model.create_session().eval([1, 2, 3])

    @pytest.mark.parametrize("make", [str, Path])
    def test_paths(self, make: Callable[[Path], Any], tiny_gguf: TinyGguf, plugins: Plugins) -> None:
        assert load_model(make(tiny_gguf("gqa")), plugins=plugins, engine=ReferenceEngine()).arch == "llama"


class TestText:
    def test_round_trip(self, load_tiny: LoadTiny) -> None:
        model = load_tiny(tokenizer="spm")
        for text in ("once upon a time", " two  spaces ", "é€😀\n", "<s>"):
            assert model.decode(model.encode(text)) == text
        assert model.encode("a")[0] == model.tokenizer.bos_id == 1
        assert model.encode("a", add_special=False) == model.encode("a")[1:]

    def test_special_tokens_are_text_without_parse_special(self, load_tiny: LoadTiny) -> None:
        model = load_tiny(tokenizer="spm")
        assert 2 not in model.encode("a</s>")
        assert model.encode("a</s>", parse_special=True)[-1] == 2

    def test_piece_has_no_state(self, load_tiny: LoadTiny) -> None:
        model = load_tiny(tokenizer="spm")
        once = model.encode("once", add_special=False)[0]
        assert model.piece(once) == " once"
        assert model.decode([1, once]) == "once"
        assert model.piece(model.tokenizer.token_id("<0xE2>")) == "\ufffd"

    def test_model_without_vocabulary_evaluates_ids(self, load_tiny: LoadTiny) -> None:
        model = load_tiny()
        assert len(list(model.create_session().generate([1, 2], max_tokens=3))) == 3
        with pytest.raises(TokenizerError, match="use token ids instead of text 'once'"):
            model.encode("once")

    def test_load_tokenizer(self, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
        tokenizer = load_tokenizer(tiny_gguf("gqa", tokenizer="spm"), plugins=plugins)
        assert tokenizer.decode(tokenizer.encode("upon a time")) == "upon a time"


class TestBadFiles:
    def load(self, path: Path, plugins: Plugins) -> None:
        load_model(path, plugins=plugins, engine=ReferenceEngine())

    def test_unreadable(self, tmp_path: Path, plugins: Plugins) -> None:
        (empty := tmp_path / "empty.gguf").touch()
        (text := tmp_path / "text.gguf").write_text("not a model")
        for path in (tmp_path / "missing.gguf", tmp_path, empty, text):
            with pytest.raises(ModelFormatError, match=str(path)):
                self.load(path, plugins)

    def test_unknown_format_lists_the_known_ones(self, tmp_path: Path, plugins: Plugins) -> None:
        (path := tmp_path / "text.bin").write_text("not a model")
        with pytest.raises(ModelFormatError, match=r"not a model file of a known format \(GGUF, llama2.c\)"):
            self.load(path, plugins)

    def test_truncated(self, tiny_gguf: TinyGguf, tmp_path: Path, plugins: Plugins) -> None:
        (path := tmp_path / "short.gguf").write_bytes(tiny_gguf("gqa").read_bytes()[:-5000])
        with pytest.raises(ModelFormatError, match=r"short\.gguf: tensor 'blk.1.*beyond the end of the file"):
            self.load(path, plugins)

    def test_all_mismatches_are_in_one_message(self, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
        path = tiny_gguf(
            "gqa",
            without=["blk.0.attn_q.weight", "blk.1.ffn_norm.weight"],
            tensors={"blk.0.attn_k.weight": np.zeros((64, 64)), "blk.1.attn_q_norm.weight": np.zeros(16)},
        )
        with pytest.raises(ModelFormatError) as raised:
            self.load(path, plugins)
        *problems, keys = str(raised.value).split("; ")
        assert keys.startswith("expected by llama.attention.head_count = 4, llama.attention.head_count_kv = 2, ")
        assert problems == [
            f"{path}: tensor blk.0.attn_q.weight is missing, expected (64, 64)",
            "tensor blk.1.ffn_norm.weight is missing, expected (64,)",
            "tensor blk.0.attn_k.weight has shape (64, 64), expected (32, 64)",
            "tensor blk.1.attn_q_norm.weight (16,) is not one that the architecture reads",
        ]

    def test_file_without_tensors_raises(self, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
        path = tiny_gguf("gqa", tokenizer="spm")
        with open_gguf(path) as file:
            path = tiny_gguf("gqa", tokenizer="spm", without=list(file.tensors))
        with pytest.raises(ModelFormatError, match=r"gguf: it has no tensors: a vocabulary only$"):
            self.load(path, plugins)

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"llama.context_length": None}, "'llama.context_length' is missing"),
            ({"llama.embedding_length": "64"}, "'llama.embedding_length' must be an integer"),
            ({"llama.block_count": 0}, "'llama.block_count' is 0; at least 1"),
            ({"llama.block_count": 100000}, "'llama.block_count' is 100000; at most 1024"),
            (
                {"llama.attention.head_count": 6},
                "embedding_length = 64 is not a multiple of llama.attention.head_count = 6",
            ),
            (
                {"llama.attention.head_count_kv": 3},
                "head_count = 4 is not a multiple of llama.attention.head_count_kv = 3",
            ),
            ({"llama.attention.key_length": 16, "llama.attention.value_length": 8}, "value_length = 8 differs"),
            ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "layer_norm_rms_epsilon' is -1.0; at least 0"),
            ({"llama.attention.layer_norm_rms_epsilon": 65504.0}, "layer_norm_rms_epsilon' is 65504.0; at most 1"),
            ({"llama.expert_count": 4}, "expert_used_count = 0 does not fit llama.expert_count = 4"),
            ({"llama.expert_count": 4, "llama.expert_used_count": 5}, "expert_used_count = 5 does not fit"),
            ({"llama.expert_used_count": 2}, "expert_used_count = 2 does not fit llama.expert_count = 0"),
            ({"llama.rope.dimension_count": 15}, "dimension_count = 15 is odd"),
            ({"llama.rope.dimension_count": 18}, "dimension_count' is 18; at most 16"),
            ({"llama.rope.scaling.type": "dynamic"}, "'dynamic' is not one of none, linear, yarn, longrope"),
            ({"llama.rope.freq_base": 0.0}, "'llama.rope.freq_base' is 0.0; at least"),
            ({"tokenizer.ggml.tokens": 5}, "'tokenizer.ggml.tokens' is not an array of strings"),
        ],
    )
    def test_metadata(self, metadata: dict[str, Any], message: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
        with pytest.raises(ModelFormatError, match=rf"\.gguf: .*{message}"):
            self.load(tiny_gguf("gqa", metadata=metadata), plugins)

    def test_vocabulary_of_another_size_raises(self, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
        tokens = [f"tok_{i}" for i in range(130)]
        path = tiny_gguf("gqa", metadata={"tokenizer.ggml.tokens": tokens})
        with pytest.raises(ModelFormatError, match=r"token_embd.weight has shape \(128, 64\), expected \(130, 64\)"):
            self.load(path, plugins)

    def test_vocab_size_key_is_used_only_without_vocabulary(self, load_tiny: LoadTiny) -> None:
        assert load_tiny(metadata={"llama.vocab_size": 4096}).config.n_vocab == 128
        bare = {"tokenizer.ggml.model": "none", "tokenizer.ggml.tokens": None, "tokenizer.ggml.scores": None}
        assert load_tiny(metadata=bare).config.n_vocab == 128

    def test_unread_keys_are_logged(self, load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "llamacli.model"):
            load_tiny(metadata={"general.other": 1})
            assert caplog.text == ""
            load_tiny(metadata={"llama.attn_logit_softcapping": 50.0, "llama.attention.scale": 0.1, "llamas.x": 1})
        (record,) = caplog.records
        assert record.message.endswith("does not use: llama.attention.scale, llama.attn_logit_softcapping")


class TestArchitectures:
    """Errors in a plugin's architecture, found by load_model."""

    @pytest.fixture
    def llama(self) -> type[Architecture]:
        from llamacli_llama import Llama

        return Llama

    def load(self, architecture: Architecture, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        load_model(path, plugins=plugin_of(architecture, monkeypatch), engine=ReferenceEngine())

    def test_configuration_that_contradicts_the_vocabulary_raises(
        self, llama: type[Architecture], tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Short(llama):
            def configure(self, metadata):  # type: ignore[no-untyped-def]
                return attrs.evolve(super().configure(metadata), n_vocab=100)

        cut = {name: np.zeros((100, 64)) for name in ("token_embd.weight", "output.weight")}
        with pytest.raises(ModelFormatError, match="the tokenizer has 128 tokens and the model 100"):
            self.load(Short(), tiny_gguf("gqa", tensors=cut), monkeypatch)

    def test_rstrip_special_tokens(
        self, llama: type[Architecture], tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Stripping(llama):
            def strips_after(self, metadata, special):  # type: ignore[no-untyped-def]
                return special == metadata["general.strips"]

        path = tiny_gguf("gqa", tokenizer="spm", metadata={"general.strips": "</s>"})
        plugins = plugin_of(Stripping(), monkeypatch)
        model = load_model(path, plugins=plugins, engine=ReferenceEngine())
        for encode in (model.encode, load_tokenizer(path, plugins=plugins).encode):
            assert encode("</s> \na", parse_special=True) == encode("</s>a", parse_special=True)
            assert encode("<s> a", parse_special=True) != encode("<s>a", parse_special=True)
        without = load_tokenizer(path, plugins=Plugins([])).encode
        assert without("</s> a", parse_special=True) != without("</s>a", parse_special=True)

    def test_error_of_plugin_in_tokenizer_loading(
        self, llama: type[Architecture], tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Faulty(llama):
            def strips_after(self, metadata, special):  # type: ignore[no-untyped-def]
                return {}[special]

        path, plugins = tiny_gguf("gqa", tokenizer="spm"), plugin_of(Faulty(), monkeypatch)
        for load in (load_tokenizer, load_model):
            with pytest.raises(PluginError, match="architecture 'llama' failed: KeyError"):
                load(path, plugins=plugins)

    def test_forward_pass_without_logits_raises(
        self, llama: type[Architecture], tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Endless(llama):
            def forward(self, g, config, weights):  # type: ignore[no-untyped-def]
                logits = super().forward(g, config, weights)
                g.add(logits, logits)
                return logits

        class Wide(llama):
            def forward(self, g, config, weights):  # type: ignore[no-untyped-def]
                return g.embed(weights.token_embd)

        for architecture in (Endless(), Wide()):
            with pytest.raises(PluginError, match=r"forward of 'llama' must end in .* logits, 128 wide"):
                self.load(architecture, tiny_gguf("gqa"), monkeypatch)

    def test_tensor_unused_by_the_forward_pass_raises(
        self, llama: type[Architecture], tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Incomplete(llama):
            def tensors(self, config):  # type: ignore[no-untyped-def]
                table = super().tensors(config)
                table.add("extra_norm", config.n_embd, optional=True, bias=True)
                return table

        self.load(Incomplete(), tiny_gguf("gqa"), monkeypatch)
        for name in ("extra_norm.weight", "extra_norm.bias"):
            path = tiny_gguf("gqa", tensors={name: np.zeros(64)})
            with pytest.raises(PluginError, match=f"forward pass leaves out {name}"):
                self.load(Incomplete(), path, monkeypatch)

    @pytest.mark.parametrize("method", ["configure", "tensors", "forward"])
    def test_error_in_architecture_method_names_the_plugin(
        self, method: str, llama: type[Architecture], tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failing = type("Failing", (llama,), {method: lambda self, *_: {}[method]})
        with pytest.raises(PluginError, match=f"architecture 'llama' failed: KeyError: '{method}'") as raised:
            self.load(failing(), tiny_gguf("gqa"), monkeypatch)
        assert isinstance(raised.value.__cause__, KeyError)

    def test_parameter_missing_from_the_table_raises(
        self, llama: type[Architecture], tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Typo(llama):
            def forward(self, g, config, weights):  # type: ignore[no-untyped-def]
                return g.embed(weights.token_embed)

        with pytest.raises(PluginError, match="'token_embed' is not in the architecture's table"):
            self.load(Typo(), tiny_gguf("gqa"), monkeypatch)


class TestClosing:
    def test_closing_frees_weights_with_open_sessions(self, load_tiny: LoadTiny) -> None:
        model = load_tiny()
        program, session = weakref.ref(model.program), model.create_session()
        session.eval([1, 2])
        gc.disable()
        try:
            model.close()
            assert program() is None
        finally:
            gc.enable()
        with pytest.raises(ClosedError, match="model is closed"):
            session.eval([3])

    def test_metadata_and_tokenizer_work_after_close(self, load_tiny: LoadTiny) -> None:
        with load_tiny(tokenizer="spm") as model:
            ids = model.encode("once")
        assert model.decode(ids) == "once"
        with pytest.raises(ClosedError):
            model.create_session()

    @pytest.mark.skipif(not STATM.exists(), reason="the system does not tell")
    def test_loading_and_closing_returns_memory(self, tmp_path: Path, plugins: Plugins, engine: Engine) -> None:
        path = tiny_llama.write_llama(tmp_path / "large.gguf", n_embd=512, n_ff=2048, context_length=4096)
        sizes = []
        gc.disable()
        try:
            for _ in range(5):
                with (
                    load_model(path, "fp32", plugins=plugins, engine=engine) as model,
                    model.create_session() as session,
                ):
                    session.eval([1, 2, 3])
                sizes.append(int(STATM.read_text().split()[1]) * 4096)
        finally:
            gc.enable()
        assert path.stat().st_size > 30e6
        assert max(sizes[2:]) - sizes[1] < 10e6

    @pytest.mark.slow
    @pytest.mark.skipif(not SMAPS.exists(), reason="needs Linux's figures of memory")
    @pytest.mark.parametrize(("name", "n_layer"), [("Q8_0", 6), ("F16", 3)])
    def test_memory_of_a_process_that_never_collects_garbage(self, tmp_path: Path, name: str, n_layer: int) -> None:
        small = tiny_llama.write_llama(tmp_path / "small.gguf", type=name)
        shape = {"n_layer": n_layer, "n_embd": 1024, "n_head": 16, "n_ff": 4096}
        large = tiny_llama.write_llama(tmp_path / "large.gguf", type=name, **shape)
        size = large.stat().st_size
        assert size > 90e6
        command = [sys.executable, "-c", LOADING, str(small), str(large)]
        env = os.environ | {"LLAMACLI_PACKED_CACHE": "0"}  # a copy is written in the background
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=240)
        sys.stdout.write(done.stdout)
        before, *after = (json.loads(line) for line in done.stdout.splitlines())
        for loaded in after:
            assert loaded["peak"] - before["Rss"] < 1.05 * size
            assert loaded["Anonymous"] - before["Anonymous"] < 0.05 * size


def test_interrupted_compilation_has_a_short_traceback(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    class Interrupted(ReferenceEngine):
        def compile(self, *_: Any) -> Any:
            def deep(n: int) -> None:
                if n:
                    deep(n - 1)
                raise KeyboardInterrupt

            deep(50)

    with pytest.raises(KeyboardInterrupt) as raised:
        load_model(tiny_gguf("gqa"), plugins=plugins, engine=Interrupted())
    assert raised.value.__suppress_context__
    assert len(raised.traceback) < 6
