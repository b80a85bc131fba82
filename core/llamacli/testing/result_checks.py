"""Checks of an architecture's results, on kernels and in NumPy."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine import Chunk, QuantMode, ReferenceEngine, Span, evaluate
from llamacli.engine.reference import ReferenceProgram
from llamacli.errors import InvalidRequestError, MediaError
from llamacli.generation.stream import eval_batch
from llamacli.graph import Tensor
from llamacli.kv import KV_TYPES, KVLayout, KVPool, KVSequence
from llamacli.media.encoder import Tile
from llamacli.media.sound import Sound
from llamacli.model import Model
from llamacli.ops.run import Run
from llamacli.quantization import TensorType
from llamacli.session import Session
from llamacli.testing.checks import block_of, first_blocks
from llamacli.testing.conformance import ConformanceError
from llamacli.testing.formulas import nmse
from llamacli.testing.hugging_face import HuggingFaceModel
from llamacli.testing.peer import run_peer
from llamacli.testing.peer_media import run_peer_encoder, write_reader
from llamacli.testing.tiny import TinyEncoder, TinyModel, rounded_types, write_float32
from llamacli.testing.tiny_media import made, sizes_of

Logits = npt.NDArray[np.float32]

N_TOKENS = 40

ENCODED = [5, 1, 3, 0, 2, 6, 1, 4, 7, 3, 2]
"""The encoder's text in models that have one; the tokens of a check follow the decoder's first."""

MODES = {QuantMode.FP32: 1e-9, QuantMode.AUTO: 1e-2, QuantMode.Q8: 1e-2, QuantMode.Q4: 1e-2}
"""Bound of the NMSE of kernels against NumPy: but for fp32, kernels round activations to 8 bits."""

_WITH_EXPERTS = 20
"""Factor of these bounds where there are experts: rounding changes some of the choices."""

KV_BOUNDS = {
    "f32": 0.0, "f16": 1e-4, "bf16": 1e-2, "q8_0": 1e-2, "q5_0": 0.2, "q5_1": 0.2, "q4_0": 0.5, "q4_1": 0.5,
    "iq4_nl": 0.5,
}  # fmt: skip
"""Bound of the NMSE of logits with a rounded cache against those with f32."""

MIXED_BOUND = 5e-3
"""Bound of the NMSE against NumPy with the same rounded cache, for most tokens of models with experts."""


def _tokens(tiny: TinyModel, n: int = N_TOKENS) -> list[int]:
    n_vocab = tiny.architecture.configure(tiny.metadata).n_vocab
    return [int(token) for token in np.random.default_rng(1).integers(0, n_vocab, n)]


def _session(tiny: TinyModel, mode: str = "fp32", **options: Any) -> Session:
    load = {name: options.pop(name) for name in ("threads", "reference") if name in options}
    model = tiny.load(mode, **load)
    session = model.create_session(**{"n_ctx": min(256, model.config.context_length), "reuse": False} | options)
    if model.program.has_encoder:
        session.eval(model.encoder_inputs(ENCODED))
    return session


def _logits(session: Session, tokens: list[int]) -> Logits:
    found = session.eval(tokens, all_logits=True)
    assert found is not None
    return found


def _expect_equal(tiny: TinyModel, what: str, expected: Logits, actual: Logits) -> None:
    differing = np.argwhere(expected != actual)
    if len(differing):
        *row, column = (int(i) for i in differing[0])
        place = f"{f'position {row[0]}, ' if row else ''}token {column}"
        found = f"{actual[tuple(differing[0])]!s} at {place}, expected {expected[tuple(differing[0])]!s}"
        raise ConformanceError(f"{tiny}: {what}: the logit is {found}; {len(differing)} logits differ")


def _encoded(model: Model, texts: list[list[int]]) -> list[Logits]:
    pool = model.kv_pool("f32")
    chunks = [Chunk(KVSequence(pool, len(ids)), list(map(int, ids)), n_last=len(ids)) for ids in texts]
    try:
        return evaluate(model.program_with, chunks)
    finally:
        for chunk in chunks:
            chunk.cache.close()


def _rows(tiny: TinyModel, tokens: list[int] | None = None, mode: str = "fp32", **load: Any) -> Logits:
    """Rows of tokens, by default of `_tokens`, or of pictures or sounds."""
    if isinstance(tiny, TinyEncoder):
        return tiny.rows(mode, **load)
    tokens = _tokens(tiny) if tokens is None else tokens
    if tiny.is_encoder:
        return _encoded(tiny.load(mode, **load), [tokens])[0]
    with _session(tiny, mode, **load) as session:
        return _logits(session, tokens)


measured: list[float] = []
"""NMSEs that checks have compared with their bounds."""

remarks: list[str] = []
"""Texts on what checks have compared, where it is not what the file has."""


def _expect_close(tiny: TinyModel, what: str, expected: Logits, actual: Logits, bound: float) -> None:
    error = nmse(actual, expected)
    measured.append(error)
    if not error <= bound:
        raise ConformanceError(f"{tiny}: {what}: NMSE {error:.2g}, at most {bound:g} is allowed")


def check_pieces(tiny: TinyModel) -> None:
    """Pieces: a prompt gives the same bits whole and in pieces."""
    tokens = _tokens(tiny)
    with _session(tiny) as whole:
        expected = _logits(whole, tokens)
    for sizes in ([1, 1, 7, 16, 15], [1] * N_TOKENS):
        with _session(tiny) as session:
            ends = np.cumsum(sizes)
            parts = [_logits(session, tokens[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        _expect_equal(tiny, f"in pieces of {sizes[:5]} tokens", expected, np.concatenate(parts))


def check_last_rows(tiny: TinyModel) -> None:
    """Last rows: computing the last logits alone gives the same bits.

    Behind the last op that mixes tokens only the last row is computed, so an op there that is not declared to mix them
    is found.
    """
    tokens = _tokens(tiny)
    for reference in (False, True):
        with _session(tiny, reference=reference) as session, _session(tiny, reference=reference) as last:
            expected = _logits(session, tokens)[-1]
            last.eval(tokens)
            engine = "in NumPy" if reference else "on kernels"
            _expect_equal(tiny, f"the last row alone, {engine}", expected, last.logits)


def check_batches(tiny: TinyModel) -> None:
    """Batches: sequences evaluated together give the same bits as alone."""
    tokens, lengths = _tokens(tiny), (17, 1, 9)
    if tiny.is_encoder:
        texts = [tokens[:n] for n in lengths]
        for n, text, rows in zip(lengths, texts, _encoded(tiny.load(), texts), strict=True):
            _expect_equal(tiny, f"a text of {n} tokens in a batch of {len(lengths)}", _rows(tiny, text), rows)
        return
    expected = []
    for n in lengths:
        with _session(tiny) as alone:
            alone.eval(tokens[:n])
            alone.eval(tokens[n : n + 1])
            expected.append(alone.logits.copy())
    together = [_session(tiny) for _ in lengths]
    eval_batch([(session, tokens[:n]) for session, n in zip(together, lengths, strict=True)])
    eval_batch([(session, tokens[n : n + 1]) for session, n in zip(together, lengths, strict=True)])
    for session, n, logits in zip(together, lengths, expected, strict=True):
        _expect_equal(tiny, f"a sequence of {n} tokens in a batch of {len(lengths)}", logits, session.logits)
        session.close()


def check_threads(tiny: TinyModel) -> None:
    """Threads: their number changes no bit."""
    _expect_equal(tiny, "on 3 threads", *(_rows(tiny, threads=threads) for threads in (1, 3)))


def mode_check(mode: QuantMode) -> Callable[[TinyModel], None]:
    """Make the check of a mode: kernels against NumPy."""

    def check_mode(tiny: TinyModel) -> None:
        expected, actual = (_rows(tiny, None, mode, reference=reference) for reference in (True, False))
        mixed = mode is not QuantMode.FP32 and bool(tiny.recorded()[3].exact_tensors())
        bound = MODES[mode] * (_WITH_EXPERTS if mixed else 1)
        _expect_close(tiny, f"kernels in mode {mode}, against NumPy", expected, actual, bound)

    return check_mode


_CHANGES = ((12, 1.0), (N_TOKENS, 1.0), (N_TOKENS, 30.0))
"""Numbers of tokens, and factors by which parameters are changed: larger ones only if smaller do not show it."""


_INTEGERS = (TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64)


def check_parameters(tiny: TinyModel) -> None:
    """Parameters: each tensor changes the logits.

    One that does not is read and forgotten. Of blocks with the same tensors the first is tried. Contexts of all
    lengths are tried at which other factors of RoPE apply.
    """
    _, _, _, graph = tiny.recorded()
    program = ReferenceEngine().compile(graph, tiny.file, QuantMode.FP32)
    assert isinstance(program, ReferenceProgram)
    limits = [length for op in graph.ops for length in op.context_lengths()]
    lengths = {N_TOKENS, *limits, *(length + 1 for length in limits)}
    tokens = np.array([] if isinstance(tiny, TinyEncoder) else _tokens(tiny), np.int32)
    weights = program.weights

    @functools.cache
    def unchanged(n_tokens: int) -> list[Logits]:
        return logits(weights, n_tokens)

    def logits(changed: dict[Tensor, npt.NDArray[np.float64]], n_tokens: int) -> list[Logits]:
        other = ReferenceProgram(graph, changed)
        if isinstance(tiny, TinyEncoder):
            return [tiny.rows_of(other)]
        found = []
        for length in sorted(lengths):
            n, text = min(length, n_tokens), np.array(ENCODED if other.has_encoder else [], np.int32)
            pool, start = KVPool(KVLayout.of(other.states, "f32", other.recurrent)), len(text)
            sequence = KVSequence(pool, start + length, other.rope_variant(length))
            sequence.reserve(0, start + n)
            if start:
                other.forward(text, [Span(sequence, 0, start, n_encoded=start)], [0])
            found.append(other.forward(tokens[:n], [Span(sequence, start, n, n_encoded=start)], [n]))
        return found

    def altered(array: npt.NDArray[np.float64], factors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        # integers stay numbers of experts
        return np.roll(array, 1, axis=0) if is_integer else array * factors

    def is_seen(factors: dict[Tensor, npt.NDArray[np.float64]], factor: float, n_tokens: int) -> bool:
        changed = weights | {tensor: altered(weights[tensor], factor * own) for tensor, own in factors.items()}
        pairs = zip(logits(changed, n_tokens), unchanged(n_tokens), strict=True)
        return any(nmse(new, old) >= 1e-13 for new, old in pairs)

    names = dict.fromkeys(tensor.name for op in graph.ops for tensor in op.tensors())
    blocks = first_blocks(tiny.file.tensors)
    for name in names:
        if block_of(name) not in blocks or tiny.is_inert(name):
            continue
        random = np.random.default_rng(len(name))
        is_integer = name in tiny.file.tensors and tiny.file.tensors[name].type in _INTEGERS
        own = {tensor: random.uniform(0.1, 3, array.shape) for tensor, array in weights.items() if tensor.name == name}
        if not any(is_seen(own, factor, n_tokens) for n_tokens, factor in _CHANGES):
            raise ConformanceError(
                f"{tiny}: tensor {name} changes no logit; one that cancels out is named in `inert` (INERT of tiny_*.py)"
            )


def check_fork(tiny: TinyModel) -> None:
    """Fork: a fork goes on as a session that began alike."""
    tokens = _tokens(tiny)
    ends = [[*tokens[30:35], 1], [*tokens[35:38], 2]]
    with _session(tiny) as session, _session(tiny) as first, _session(tiny) as second:
        session.eval(tokens[:30])
        with session.fork() as fork:
            for own, alone, end in ((session, first, ends[0]), (fork, second, ends[1])):
                own.eval(end)
                alone.eval([*tokens[:30], *end])
                _expect_equal(tiny, f"a {'fork' if own is fork else 'forked session'}", alone.logits, own.logits)


def check_rewind(tiny: TinyModel) -> None:
    """Rewind: going back and on gives the same bits as going on."""
    tokens = _tokens(tiny)
    with _session(tiny) as session, _session(tiny) as expected:
        start = session.n_past
        session.eval(tokens)
        for n_past in (30, 13, 0):
            session.rewind(start + n_past)
            session.eval(tokens[n_past : n_past + 6])
            expected.rewind(start)
            expected.eval(tokens[: n_past + 6])
            _expect_equal(tiny, f"after going back to token {n_past}", expected.logits, session.logits)


def check_cut(tiny: TinyModel) -> None:
    """Cut: tokens are removed from the middle, or refused with the reason.

    Kernels are compared with NumPy.
    """
    tokens = _tokens(tiny)
    results: list[Logits | str] = []
    for reference in (True, False):
        with _session(tiny, reference=reference) as session:
            session.eval(tokens[:30])
            before = session.tokens
            try:
                session.remove_range(5, 11)
            except InvalidRequestError as error:
                if session.tokens != before:
                    raise ConformanceError(f"{tiny}: a refused removal changed the session: {error}") from error
                results.append(str(error))
                continue
            session.eval(tokens[30:])
            results.append(session.logits.copy())
    expected, actual = results
    if isinstance(expected, str) or isinstance(actual, str):
        if not (isinstance(expected, str) and isinstance(actual, str)):
            raise ConformanceError(f"{tiny}: removing tokens is refused by one engine only: {expected}, {actual}")
        return
    _expect_close(tiny, "after removing tokens, against NumPy", expected, actual, 1e-8)


def check_saved_state(tiny: TinyModel) -> None:
    """Saved state: a loaded session goes on as the saved one."""
    tokens = _tokens(tiny)
    with _session(tiny) as session, _session(tiny) as loaded:
        session.eval(tokens[:30])
        loaded.load_state(session.save_state())
        for continued in (session, loaded):
            continued.eval(tokens[30:])
        _expect_equal(tiny, "after saving and loading", session.logits, loaded.logits)


def check_cache_types(tiny: TinyModel) -> None:
    """Cache types: each gives logits close to those of f32.

    In pieces they are the same. Models with experts are compared with NumPy on a cache of the same type, and by the
    median of the rows: rounding changes the choice of experts of single tokens.
    """
    tokens, mixed = _tokens(tiny), bool(tiny.recorded()[3].exact_tensors())
    with _session(tiny, kv_type="f32") as exact:
        expected = _logits(exact, tokens)
    for kv_type in KV_TYPES:
        with _session(tiny, kv_type=kv_type) as whole, _session(tiny, kv_type=kv_type) as pieces:
            logits = _logits(whole, tokens)
            if mixed:
                with _session(tiny, kv_type=kv_type, reference=True) as reference:
                    expected = _logits(reference, tokens)
                row = int(np.argsort([nmse(*rows) for rows in zip(logits, expected, strict=True)])[N_TOKENS // 2])
                _expect_close(tiny, f"with a {kv_type} cache", expected[row], logits[row], MIXED_BOUND)
            else:
                _expect_close(tiny, f"with a {kv_type} cache", expected, logits, KV_BOUNDS[kv_type])
            parts = [_logits(pieces, part) for part in (tokens[:9], tokens[9:10], tokens[10:])]
            _expect_equal(tiny, f"in pieces, with a {kv_type} cache", logits, np.concatenate(parts))


def check_peer(tiny: TinyModel) -> None:
    """Peer: logits and greedy tokens of llama.cpp.

    Greedy tokens must be equal up to the first that llama.cpp chooses by a small margin. Of encoders the hidden states
    are compared. A variant whose bound is None is left out.

    llama.cpp rounds activations before products with weights that are not float32: it runs the same weights as float32
    beside mode fp32, and the file beside mode auto, which rounds too, with the bound of that mode. Raises ImportError
    without llama-cpp-python.
    """
    if tiny.exact is None:
        return
    if isinstance(tiny, TinyEncoder):
        _check_peer_encoder(tiny, tiny.exact)
        return
    tokens, n_greedy = _tokens(tiny), 0 if tiny.is_encoder else _N_GREEDY
    graph = tiny.recorded()[3]
    embeds = tiny.is_encoder and graph.ops[-1].out.width != tiny.recorded()[0].n_vocab
    types = rounded_types(tiny.path)
    try:
        with tempfile.TemporaryDirectory(prefix="llamacli-float32-") as folder:
            path = write_float32(tiny.path, Path(folder) / "model.gguf") if types else tiny.path
            results = run_peer(path, tokens, _N_PROMPT, n_greedy, embeddings=embeds, encoded=ENCODED)
        rounded = run_peer(tiny.path, tokens, _N_PROMPT, 0, embeddings=embeds, encoded=ENCODED)[0] if types else None
    except OSError as error:
        raise ConformanceError(f"{tiny}: {error}") from error
    if rounded is None:
        _expect_results(tiny, "llama.cpp", *results)
        return
    bound = MODES[QuantMode.AUTO] * (_WITH_EXPERTS if graph.exact_tensors() else 1)
    reason = f"llama.cpp rounds activations before products with {', '.join(types)}"
    _expect_results(tiny, f"llama.cpp on these weights as float32 ({reason})", *results)
    remarks.append(f"{tiny.name}: {reason}: fp32 is compared with its run of float32 copies, auto up to {bound:g}")
    found = nmse(_rows(tiny, tokens, QuantMode.AUTO), rounded)
    if not found <= bound:
        said = f"mode auto against llama.cpp: NMSE {found:.2g}, at most {bound:g} is allowed, because {reason}"
        raise ConformanceError(f"{tiny}: {said}")


def _check_peer_encoder(tiny: TinyEncoder, bound: float) -> None:
    """Compare embeddings of pictures or sounds with those of llama.cpp's mtmd."""
    types = rounded_types(tiny.path)
    try:
        with tempfile.TemporaryDirectory(prefix="llamacli-reader-") as folder:
            reader = write_reader(Path(folder) / "reader.gguf", tiny.recorded()[3].ops[-1].out.width)
            rows = run_peer_encoder(reader, tiny.path, sizes_of(tiny.encoder))
    except OSError as error:
        raise ConformanceError(f"{tiny}: {error}") from error
    expected, mode = np.concatenate([*rows.values()]), QuantMode.AUTO if types else QuantMode.FP32
    actual = tiny.rows(mode)
    if actual.shape != expected.shape:
        raise ConformanceError(f"{tiny}: rows of embeddings {actual.shape}, of llama.cpp {expected.shape}")
    _expect_close(tiny, "embeddings of llama.cpp", expected, actual, max(bound, MODES[mode]) if types else bound)


LAYOUTS = ((1, 1), (2, 3), (1, 90), (90, 1), (33, 47), (640, 480))
"""Widths and heights of pictures that an encoder divides, or refuses."""

SOUND_LAYOUTS = (1 / 16_000, 0.01, 0.5, 1.003, 9.7)
"""Seconds of sounds that an encoder divides, or refuses."""


def check_layouts(tiny: TinyModel) -> None:
    """Layouts: media of all sizes are divided into tiles, or refused.

    Equal ones have equal content keys, other ones others; each tile has as many embeddings as keys.
    """
    assert isinstance(tiny, TinyEncoder)
    with closing(tiny.load_encoder(QuantMode.FP32, ReferenceEngine())) as loaded:
        for size in SOUND_LAYOUTS if loaded.medium is Sound else LAYOUTS:
            try:
                one, again, other = (loaded.layout(loaded.medium.of(made(size, seed))) for seed in (0, 0, 1))
            except MediaError:
                continue
            found, same, others = (
                [part for part in layout if isinstance(part, Tile)] for layout in (one, again, other)
            )
            what = f"a picture of {size[0]} x {size[1]} pixels" if isinstance(size, tuple) else f"sound of {size:g} s"
            if not found:
                raise ConformanceError(f"{tiny}: {what} has no tiles")
            if [tile.ids for tile in found] != [tile.ids for tile in same] or found[0] == others[0]:
                raise ConformanceError(f"{tiny}: the tiles of {what} do not depend on it alone")
            if len(rows := loaded.encode(found[0])) != len(found[0].ids):
                raise ConformanceError(f"{tiny}: {what}: {len(rows)} embeddings, {len(found[0].ids)} expected")


def transformers_check(models: Mapping[str, tuple[HuggingFaceModel, int]]) -> Callable[[TinyModel], None]:
    """Make the check against transformers: originals with seeds, by tiny model's name."""

    def check_transformers(tiny: TinyModel) -> None:
        model, seed = models[tiny.name]
        results = model.run(_tokens(tiny), _N_PROMPT, _N_GREEDY, seed)
        _expect_results(tiny, "transformers", results.logits, results.greedy, results.gaps)

    return check_transformers


def _expect_results(tiny: TinyModel, other: str, logits: Logits, greedy: list[int], gaps: list[float]) -> None:
    tokens, bound = _tokens(tiny), tiny.exact
    assert bound is not None
    if tiny.is_encoder:
        _expect_close(tiny, f"against {other}", logits, _rows(tiny, tokens), bound)
        return
    with _session(tiny, n_ctx=256) as session:
        start = session.n_past
        _expect_close(tiny, f"against {other}", logits, _logits(session, tokens), bound)
        session.rewind(start)
        actual = [token.id for token in session.generate(tokens[:_N_PROMPT], max_tokens=_N_GREEDY, ignore_eos=True)]
    n_sure = next((i for i, gap in enumerate(gaps) if gap < _NARROW), len(gaps))
    if actual[:n_sure] != greedy[:n_sure]:
        raise ConformanceError(f"{tiny}: greedy tokens {actual[:n_sure]}, of {other} {greedy[:n_sure]}")


_N_PROMPT = 20
_N_GREEDY = 20
_NARROW = 1e-3


def check_declarations(tiny: TinyModel) -> None:
    """Declarations: ops that mix tokens or use positions say so.

    Every other op computes a row that depends neither on the other rows nor on its position.
    """
    _, _, _, graph = tiny.recorded()
    program = ReferenceEngine().compile(graph, tiny.file, QuantMode.FP32)
    tokens = np.array(_tokens(tiny, 9), np.int32)
    sequence = KVSequence(KVPool(KVLayout.of(program.states, "f32", program.recurrent)), 64, program.rope_variant(64))
    n, n_encoded = len(tokens), len(tokens) if program.has_encoder else 0
    sequence.reserve(0, n + n_encoded)
    values: dict[Any, Any] = {}
    for i, op in enumerate(graph.ops):
        first = 0 if i < graph.n_encoder else n_encoded
        whole = Run(
            tokens, Span(sequence, first, n, n_encoded=n_encoded), program.states, values, program.weights.__getitem__
        )
        values[op.out] = np.asarray(op.compute(whole), np.float32)
        if op.mixes_tokens:
            continue
        for row in (3, len(tokens) - 1):
            alone = {value: values[value][row : row + 1] for value in op.inputs()}
            for start in {row} if op.uses_position else {row, row + 1}:
                span = attrs.evolve(whole.span, start=first + start, n=1)
                run = attrs.evolve(whole, tokens=tokens[row : row + 1], span=span, values=alone)
                got = np.asarray(op.compute(run), np.float32)[0]
                expected = values[op.out][row]
                if not np.allclose(got, expected, rtol=1e-5, atol=1e-6 * (1 + np.abs(expected).max(initial=0))):
                    cause = ("other tokens", "mixes_tokens") if start == row else ("its position", "uses_position")
                    verb = type(op).__name__
                    raise ConformanceError(
                        f"{tiny}: {verb} depends on {cause[0]}, but {cause[1]} of its class is False"
                    )


_GUARDED = """
import importlib, sys
from llamacli.testing import guarded
side, path, module, name = sys.argv[1:]
guarded.install(side)
from pathlib import Path
from llamacli import load_model
from llamacli.media.encoder import MediaEncoder
from llamacli.plugins import Plugins
from llamacli.testing.tiny import TinyEncoder
for part in name.split("."):
    architecture = getattr(importlib.import_module(module) if part == name.split(".")[0] else architecture, part)
for mode in ("fp32", "auto"):
    if issubclass(architecture, MediaEncoder):
        TinyEncoder(architecture(), "", Path(path), None).rows(mode, threads=2)
        continue
    with load_model(path, mode, plugins=Plugins.of(architecture()), threads=2) as model:
        if model.program.needs_whole_input:
            from llamacli.tools.embedding import Embedder
            Embedder(model, 0).embed([3, 1, 2, 0, 5, 4, 7], pooling="none", normalize=False)
            continue
        with model.create_session(n_ctx=64) as session:
            if model.program.has_encoder:
                session.eval(model.encoder_inputs([3, 1, 2]))
            session.eval([3, 1, 2, 0, 5, 4, 7])
            session.eval([6])
"""


def check_memory(tiny: TinyModel) -> None:
    """Memory: kernels stay within theirs.

    In a process of its own, every array ends or begins at a page that ends the process when touched. The class of the
    architecture must be one that its module has, with a constructor without arguments.
    """
    kind = type(tiny.architecture)
    paths = os.pathsep.join(filter(None, sys.path))
    for side in ("end", "start"):
        done = subprocess.run(
            [sys.executable, "-c", _GUARDED, side, str(tiny.path), kind.__module__, kind.__qualname__],
            env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            place = "behind the end" if side == "end" else "before the start"
            raise ConformanceError(
                f"{tiny}: with a forbidden page {place} of arrays, the process ended with {done.returncode}: {last}"
            )
