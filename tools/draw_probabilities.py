"""Picture of token probabilities as an SVG: `python tools/draw_probabilities.py`.

The demo model continues a text. Each token is coloured by its probability, as on the page of `llamacli run --html`;
below a token are the most probable ones in its place. Writes docs/pictures/probabilities.svg.
"""

import html
import math
from collections.abc import Iterator
from pathlib import Path

import llamacli

PATH = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "probabilities.svg"

PROMPT = "One rainy morning, a small fox"
N_TOKENS, N_PROBS, SEED = 30, 3, 7

CHARACTER_WIDTH, LINE_HEIGHT = 8.43, 17
CELL_HEIGHT = (N_PROBS + 2) * LINE_HEIGHT
MARGIN, GAP, WIDTH = 16, 6, 830

_STYLE = (
    "text{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre;fill:#222}"
    ".o{font-size:11px;fill:#777}.c{fill:#222;font-weight:bold}"
)


def colour(probability: float) -> str:
    """CSS colour: white for 1, red for 0."""
    return f"hsl(8 85% {60 + 40 * probability:.0f}%)"


def cells() -> Iterator[tuple[str, float, list[tuple[str, float, bool]]]]:
    """Text and probability of each token, with the most probable ones.

    Of these the text, the probability, and whether it is the token.
    """
    params = llamacli.SamplingParams(temperature=1.0, n_probs=N_PROBS)
    with llamacli.load_model(llamacli.demo_path()) as model, model.create_session(seed=SEED) as session:
        for token in session.generate(PROMPT, params, max_tokens=N_TOKENS):
            assert token.logprobs is not None, "n_probs asks for them"
            others = [(model.piece(other), math.exp(value), other == token.id) for other, value in token.logprobs.top]
            yield token.piece, math.exp(token.logprobs.chosen), others


def drawn() -> str:
    """Picture as an SVG."""
    parts = [f'<text x="{MARGIN}" y="{MARGIN + 14}">{html.escape(PROMPT)}</text>']
    x, y = MARGIN + len(PROMPT) * CHARACTER_WIDTH + GAP, float(MARGIN)
    for text, probability, others in cells():
        shown = visible(text)
        lines = [f"{value:4.0%} {visible(other)}" for other, value, _ in others]
        width = max(len(shown) * CHARACTER_WIDTH + 8, max(map(len, lines)) * CHARACTER_WIDTH * 11 / 14 + 4)
        if x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + CELL_HEIGHT
        box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE_HEIGHT + 2}" rx="3"'
        parts.append(f'<rect {box} fill="{colour(probability)}"/>')
        parts.append(f'<text x="{x + 3:.1f}" y="{y + 14}">{html.escape(shown)}</text>')
        for number, (line, (_, _, is_token)) in enumerate(zip(lines, others, strict=True), start=1):
            kind = "o c" if is_token else "o"
            at = f'x="{x + 3:.1f}" y="{y + 16 + number * 14}"'
            parts.append(f'<text class="{kind}" {at}>{html.escape(line)}</text>')
        x += width + GAP
    height = round(y + CELL_HEIGHT)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>', *parts, "</svg>\n"])


def visible(text: str) -> str:
    """Text of a token with visible white space."""
    return text.lstrip(" ").replace("\n", "⏎") or "␣"


if __name__ == "__main__":
    PATH.write_text(drawn(), encoding="utf-8")
