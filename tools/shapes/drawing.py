"""Pictures of one shape or digit, with questions about them."""

from __future__ import annotations

import math
import random

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "black": (20, 20, 20)}
SHAPES = ("circle", "square", "triangle", "cross")
SEGMENTS = ("012456", "25", "02346", "02356", "1235", "01356", "013456", "025", "0123456", "012356")
"""Segments of the digits: top, upper left and right, middle, lower left and right, bottom."""

_ENDS = ((0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 1, 1), (0, 1, 1, 1), (0, 1, 0, 2), (1, 1, 1, 2), (0, 2, 1, 2))
SIDE = 96
"""Side of a picture, in pixels."""

KINDS = (*SHAPES, *map(str, range(10)))


def drawn(kind: str, colour: str, centre: tuple[float, float], radius: float, side: int = SIDE) -> Image.Image:
    """Draw a shape or a digit on white.

    Centre and radius are shares of the side.
    """
    image = Image.new("RGB", (side, side), "white")
    draw, fill = ImageDraw.Draw(image), COLOURS[colour]
    x, y, r = centre[0] * side, centre[1] * side, radius * side
    if kind == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif kind == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=fill)
    elif kind == "triangle":
        draw.polygon([(x + r * math.sin(a), y - r * math.cos(a)) for a in (0, 2.0944, 4.1888)], fill=fill)
    elif kind == "cross":
        draw.line((x - r, y - r, x + r, y + r), fill, round(r / 2))
        draw.line((x - r, y + r, x + r, y - r), fill, round(r / 2))
    else:
        for i in map(int, SEGMENTS[int(kind)]):
            x0, y0, x1, y1 = _ENDS[i]
            ends = x + (x0 - 0.5) * r, y + (y0 - 1) * r, x + (x1 - 0.5) * r, y + (y1 - 1) * r
            draw.line(ends, fill, round(r / 3))
    return image


def example(rng: random.Random) -> tuple[Image.Image, str, str]:
    """A random picture, a question about it, and the answer."""
    kind, colour = rng.choice(KINDS), rng.choice([*COLOURS])
    radius = rng.uniform(0.28, 0.4)
    centre = rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius)
    named = f"the digit {kind}" if kind.isdigit() else f"a {kind}"
    question, answer = rng.choice(
        (
            ("What is it?", f"It is {named}."),
            ("Which colour is it?", f"It is {colour}."),
            ("Is it a digit?", "Yes." if kind.isdigit() else "No."),
        )
    )
    return drawn(kind, colour, centre, radius), question, answer
