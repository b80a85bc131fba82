"""Names and limits of settings that are needed before NumPy is imported."""

import enum

MAX_CONTEXT = (1 << 31) - 1
"""Upper limit of a context's length in tokens: positions are 32-bit integers."""

MAX_THREADS = 1024
"""Upper limit of the number of threads."""

KERNEL_API = 2
"""Version of `llamacli.kernels.api` and `Lowering`, which plugins with kernels declare as LLAMACLI_KERNEL_API."""

KERNEL_API_CHANGE = "since 2, `to.step(kernel, RECORD, x=x, out=out, width=...)` takes the fields of the record by name"
"""Latest change of KERNEL_API."""


class QuantMode(enum.StrEnum):
    """Types of weights in memory.

    `auto`: as in the file; `fp32`: exact; `q8` and `q4`: requantized at load.
    """

    AUTO = "auto"
    FP32 = "fp32"
    Q8 = "q8"
    Q4 = "q4"


class LoadMode(enum.StrEnum):
    """Places of weights.

    `memory`; `map`: a packed copy on disk; `auto`: memory if they fit.
    """

    AUTO = "auto"
    MEMORY = "memory"
    MAP = "map"


class SplitMode(enum.StrEnum):
    """Ways in which a model is divided among machines.

    `layer`: layers (pipeline parallelism); `row`: rows of each matrix product (tensor parallelism).
    """

    LAYER = "layer"
    ROW = "row"


class Prompts(enum.StrEnum):
    """Ways of prompts through matrix products.

    `registers`: as generated tokens; `tiles`: by AMX, with weights and activations rounded to bfloat16.
    """

    REGISTERS = "registers"
    TILES = "tiles"


class KVTypeName(enum.StrEnum):
    """GGML names of KV cache types; see `llamacli.kv.KV_TYPES`."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    IQ4_NL = "iq4_nl"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
