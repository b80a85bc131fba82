"""Test parameters for plugins: every check of an architecture, as pytest parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import attrs
import pytest

from llamacli.architecture import Architecture
from llamacli.engine import QuantMode
from llamacli.media.encoder import MediaEncoder
from llamacli.testing import checks, result_checks
from llamacli.testing.hugging_face import HuggingFaceModel
from llamacli.testing.tiny import Family, TinyModel, Variant

CheckFunction = Callable[[TinyModel], None]

FILES: dict[str, CheckFunction] = {
    "tables": checks.check_tables,
    "keys": checks.check_keys,
    "tensors": checks.check_tensors,
}
"""Checks that load no model. The table is checked with all variants, errors with those of different structure."""

RESULTS: dict[str, CheckFunction] = {
    "declarations": result_checks.check_declarations,
    "parameters": result_checks.check_parameters,
    "pieces": result_checks.check_pieces,
    "last_rows": result_checks.check_last_rows,
    "batches": result_checks.check_batches,
    "threads": result_checks.check_threads,
    **{f"mode_{mode.value}": result_checks.mode_check(mode) for mode in QuantMode},
    "fork": result_checks.check_fork,
    "rewind": result_checks.check_rewind,
    "cut": result_checks.check_cut,
    "saved_state": result_checks.check_saved_state,
    "cache_types": result_checks.check_cache_types,
}
"""Checks that run a model: the first variant, and the others of other structure."""

MEDIA: dict[str, CheckFunction] = {
    "layouts": result_checks.check_layouts,
    **{name: RESULTS[name] for name in ("parameters", "threads", *(f"mode_{mode.value}" for mode in QuantMode))},
}
"""Checks that run a media encoder, in the place of `RESULTS`."""

OF_SESSIONS = {"pieces", "last_rows", "fork", "rewind", "cut", "saved_state", "cache_types"}
"""Checks of sessions, which encoders do not have."""

PROCESSES: dict[str, CheckFunction] = {"memory": result_checks.check_memory}
"""Checks that start a process."""


N_SEEDS = 2
"""Random configurations of each model of transformers."""

PEER: dict[str, CheckFunction] = {"peer": result_checks.check_peer}
"""Checks that need llama-cpp-python, for all variants."""


@attrs.frozen
class Check:
    """Check of an architecture over some of its tiny models.

    `scope` is "all", "distinct" for one of each structure, "first" of these, or "others" for the rest of these.
    """

    name: str
    family: Family
    function: CheckFunction
    scope: str

    @property
    def id(self) -> str:
        """Name of the architecture, of the check and, for the others, that."""
        return f"{self.family.architecture.name}-{self.name}{'-others' if self.scope == 'others' else ''}"

    def models(self) -> list[TinyModel]:
        """Tiny models that the check runs over."""
        found = self.family.models if self.scope == "all" else self.family.distinct
        if self.scope in ("first", "others"):
            found = found[:1] if self.scope == "first" else found[1:]
        return [model for model in found if self.name not in OF_SESSIONS or not model.is_encoder]

    def __call__(self) -> float | None:
        """Run the check; its largest NMSE, or None. Raises ConformanceError."""
        result_checks.measured.clear()
        result_checks.remarks.clear()
        for model in self.models():
            self.function(model)
        return max(result_checks.measured, default=None)


def checks_of(
    architecture: Architecture,
    variants: Mapping[str, Variant] | None = None,
    *,
    inert: Sequence[str] = (),
    unread: Sequence[str] = (),
    peer: bool = False,
    transformers: Sequence[HuggingFaceModel] = (),
) -> list[Check]:
    """All checks of an architecture over its variants; see `parametrize_with_checks`.

    With `peer`, results are compared with llama.cpp's too; with models of `transformers`, with theirs.
    """
    family = Family(architecture, variants, inert, unread)
    results = MEDIA if isinstance(architecture, MediaEncoder) else RESULTS
    return [
        *_transformers(architecture, transformers),
        Check("tables", family, checks.check_tables, "all"),
        *(Check(name, family, function, "distinct") for name, function in FILES.items() if name != "tables"),
        *(Check(name, family, function, "first") for name, function in results.items()),
        *(Check(name, family, function, "first") for name, function in PROCESSES.items()),
        *(Check(name, family, function, "others") for name, function in results.items()),
        *(Check(name, family, function, "all") for name, function in PEER.items() if peer),
    ]


def _transformers(architecture: Architecture, models: Sequence[HuggingFaceModel]) -> Iterator[Check]:
    originals = {f"{model.model_type}-{seed}": (model, seed) for model in models for seed in range(N_SEEDS)}
    variants: dict[str, Variant] = {
        name: (model.write, {"architecture": architecture, "seed": seed}, model.exact)
        for name, (model, seed) in originals.items()
    }
    if originals:
        check = result_checks.transformers_check(originals)
        yield Check("transformers", Family(architecture, variants), check, "all")


def parametrize_with_checks(
    architectures: Iterable[Architecture],
    variants: Mapping[str, Variant] | None = None,
    *,
    inert: Sequence[str] = (),
    unread: Sequence[str] = (),
    transformers: Mapping[str, Sequence[HuggingFaceModel]] | None = None,
    slow: Any = (),
) -> pytest.MarkDecorator:
    """Parametrize a test with the checks of architectures.

        @parametrize_with_checks([MyArchitecture()])
        def test_architecture(check):
            check()

    `variants` are tiny models, see `llamacli.testing.tiny`; each architecture is checked with those that are files of
    it. Without them, files are made from the architecture's own table.

    `inert` are patterns of tensors that cannot change the logits, such as `*.attn_k.bias` without RoPE, which cancels
    out in softmax; `variant:*.exp_probs_b.bias` is one of a single tiny model. `unread` are patterns of keys that files
    have and the architecture does not depend on.

    `transformers` are models of Hugging Face's transformers by the name of the architecture, to compare with where that
    and torch are installed.

    `slow` is a mark, or several, for checks that take longer: those of variants of other structure than the first,
    those against transformers, and those that start a process.
    """
    params = [
        pytest.param(check, id=check.id, marks=_marks(check, slow))
        for architecture in architectures
        for check in checks_of(
            architecture, variants, inert=inert, unread=unread,
            transformers=(transformers or {}).get(architecture.name, ()),
        )
    ]  # fmt: skip
    return pytest.mark.parametrize("check", params)


def _marks(check: Check, slow: Any) -> list[Any]:
    longer = check.scope == "others" or check.name in PROCESSES or check.name == "transformers"
    marks = list(slow if isinstance(slow, Sequence) else [slow]) if longer else []
    if check.name == "transformers" and not (find_spec("torch") and find_spec("transformers")):
        marks.append(pytest.mark.skip(reason="torch and transformers are not installed"))
    return marks
