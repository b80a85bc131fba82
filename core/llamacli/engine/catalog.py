"""List of all kernels: shared ones and those of each op.

Those of plugins' ops are included.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llamacli.engine.base import QuantMode
from llamacli.engine.examples import Example, examples_of, op_classes
from llamacli.engine.floats import modes_of
from llamacli.engine.lowering import StepTable
from llamacli.engine.weights import PackedWeights
from llamacli.errors import PluginError, plugin_errors
from llamacli.gguf import Metadata
from llamacli.graph import Tensor
from llamacli.kernels.catalog import CACHES, shared_kernels
from llamacli.kernels.jit import ArrayFunction, Compiled, Kernel
from llamacli.kernels.matrix import Matrix
from llamacli.kernels.packing_formats import ROWS
from llamacli.kernels.registry import packings
from llamacli.kernels.team import Team
from llamacli.loaders import ArrayFile
from llamacli.ops.lowering import Step
from llamacli.quantization import TensorType
from llamacli.tokenizer import kernels as tokenizer_kernels

_log = logging.getLogger(__name__)


class _NoTeam(Team):
    """Team of one thread that is not started: nothing is run."""

    def __init__(self) -> None:
        self.n_threads, self.nodes = 1, ()


class _EmptyWeights(PackedWeights):
    """Weights of an example that are not loaded.

    Matrices are empty, so no packing kernel is compiled.
    """

    def __init__(self, example: Example, team: Team):
        file = ArrayFile(Path("example"), Metadata({}), example.weights)
        super().__init__(file, modes_of(example.graph, QuantMode.FP32), team)

    def _load_matrix(self, tensor: Tensor) -> Matrix:
        packing = packings()[TensorType.F32]
        n_out, n_in = (1, *tensor.shape)[-2:]
        n_groups = tensor.shape[0] if len(tensor.shape) > 2 else 1
        shape = n_groups, -(-n_out // ROWS), -(-n_in // packing.block), packing.n_bytes
        return Matrix(TensorType.F32, np.empty(shape, np.uint8), (n_out, n_in), packing)


def _steps_of(example: Example, team: Team) -> list[Step]:
    return StepTable(example.graph, _EmptyWeights(example, team), team).steps


def _kernels_of_ops(team: Team) -> Iterator[Kernel]:
    """Kernels of each op's examples, for every cache type.

    An op whose examples fail is reported and left out.
    """
    for op in op_classes():
        try:
            with plugin_errors(f"listing the kernels of verb {op.__name__} of {op.__module__.partition('.')[0]}"):
                steps = [step for example in examples_of(op) for step in _steps_of(example, team)]
        except PluginError as error:
            _log.warning("%s", error)
            continue
        for kernel in (step.kernel for step in steps):
            if isinstance(kernel, Kernel):
                yield kernel
            elif kernel is not None:
                yield from map(kernel, CACHES)


def catalog() -> list[Compiled]:
    """List all kernels, each once, without compiling any."""
    tokenizers = [value for value in vars(tokenizer_kernels).values() if isinstance(value, ArrayFunction)]
    kernels = [*shared_kernels(), *tokenizers, *_kernels_of_ops(_NoTeam())]
    return list({kernel.name: kernel for kernel in kernels}.values())
