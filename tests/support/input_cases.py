"""Inputs that llama.cpp's logits are recorded of: text, embeddings, text."""

from dataclasses import dataclass

import numpy as np

from llamacli.inputs import Inputs
from oracle.goldens import TOKENS

BEFORE, ROWS, AFTER = TOKENS[:7].tolist(), 12, TOKENS[7:14].tolist()
WHOLE = "gqa"
"""Tiny model that is run on BEFORE with attention in both directions."""

PLACEHOLDER = 5
"""Id in the place of embeddings, which no result may depend on."""


@dataclass(frozen=True)
class Case:
    """A tiny model, and the positions of its embeddings.

    They are consecutive, or a `grid` of so many rows and columns. With `both_ways` the embeddings attend to each other
    in both directions.
    """

    variant: str
    grid: tuple[int, int] | None = None
    extra: int = 0
    both_ways: bool = False

    @property
    def positions(self) -> np.ndarray | None:
        """Positions of the embeddings, int32 [ROWS, 4]."""
        if self.grid is None:
            return None
        time, (height, width) = len(BEFORE), self.grid
        rows = [(time, time + y, time + x, self.extra) for y in range(height) for x in range(width)]
        return np.array(rows, np.int32)

    @property
    def position_after(self) -> int:
        """Position of the first token after the embeddings."""
        return len(BEFORE) + (ROWS if self.grid is None else max(self.grid))

    def embeddings(self, width: int) -> np.ndarray:
        """Rows of embeddings, float32 [ROWS, width]."""
        return np.random.RandomState(4321).normal(0, 0.5, (ROWS, width)).astype(np.float32)

    def inputs(self, width: int) -> Inputs:
        """The whole input: BEFORE, embeddings, AFTER."""
        ids = [*BEFORE, *[PLACEHOLDER] * ROWS, *AFTER]
        rows = range(len(BEFORE), len(BEFORE) + ROWS)
        positions = None
        if self.positions is not None:
            positions = np.full((len(ids), 4), -1, np.int32)
            positions[rows] = self.positions
        spans = [(rows.start, rows.stop)] if self.both_ways else []
        return Inputs.of(ids, embeddings=self.embeddings(width), rows=rows, positions=positions, spans=spans)


CASES = {
    "gqa": Case("gqa"),
    "gqa both ways": Case("gqa", both_ways=True),
    "gemma": Case("gemma"),
    "gemma2": Case("gemma2"),
    "gemma3": Case("gemma3"),
    "gemma3 both ways": Case("gemma3", both_ways=True),
    "gemma4_e": Case("gemma4_e"),
    "gemma3n": Case("gemma3n"),
    "granite": Case("granite"),
    "minicpm": Case("minicpm"),
    "gpt2": Case("gpt2"),
    "deepseek2": Case("deepseek2"),
    "rwkv7": Case("rwkv7"),
    "qwen2vl": Case("qwen2vl"),
    "qwen2vl in a grid": Case("qwen2vl", (3, 4)),
    "qwen2vl_four_sections in a grid": Case("qwen2vl_four_sections", (4, 3), extra=9),
    "qwen2vl_yarn in a grid": Case("qwen2vl_yarn", (2, 6)),
    "qwen3vl in a grid": Case("qwen3vl", (3, 4)),
    "qwen3vl in a row both ways": Case("qwen3vl", (1, 12), both_ways=True),
    "qwen3vlmoe in a grid": Case("qwen3vlmoe", (12, 1)),
    "glm4_sections in a grid": Case("glm4_sections", (3, 4)),
    "glm4_four_sections in a grid": Case("glm4_four_sections", (4, 3), extra=9),
    "glm4moe_sections in a grid": Case("glm4moe_sections", (3, 4)),
    "qwen35 in a grid": Case("qwen35", (3, 4)),
    "qwen35moe in a grid": Case("qwen35moe", (3, 4)),
}
