#!/usr/bin/env python3
"""Train the model of the tutorial on pictures: shapes.gguf and mmproj-shapes.gguf.

    python tools/shapes/train.py docs/tutorials/shapes --minutes 3

Needs torch (2.13.0 on the CPU was used), Pillow, and llamacli with its `testing` extra. The text model is a Llama of
two layers with tokens of bytes, the encoder a SigLIP of two layers with the connector of Idefics 3; both learn from the
first step, from pictures of `drawing.example`. A picture is one tile of 32 x 32 pixels: 16 patches, 4 tokens, twice.
"""

import argparse
import random
import time
from pathlib import Path

import numpy as np
import torch
from drawing import example
from torch import Tensor
from torch.nn import functional

from gguf import GGMLQuantizationType as Type
from llamacli.media.pictures import unfolded
from llamacli.testing.models import write_gguf
from llamacli.testing.vocabularies import CONTROL, byte_level

WIDTH, HEADS, HIDDEN, LAYERS = 64, 4, 128, 2
SIDE, PATCH, MERGE = 32, 8, 2
EPS, BASE, BATCH = 1e-5, 10_000.0, 96
SPECIAL = ("<user>", "<assistant>", "<eos>", "<image>", "<fake_token_around_image>", "<row_1_col_1>", "<global-img>")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
IDS = {name: 256 + i for i, name in enumerate(SPECIAL)}
N_VOCAB = 256 + len(SPECIAL) + 1
ROW = -1
"""Place of a picture's row among ids."""


def prompt(question: str) -> list[int]:
    """Ids of a prompt: a picture and a question in the template."""
    around, rows = IDS["<fake_token_around_image>"], [ROW] * (SIDE // PATCH // MERGE) ** 2
    picture = [around, IDS["<row_1_col_1>"], *rows, 10, 10, around, IDS["<global-img>"], *rows, around]
    return [IDS["<user>"], *picture, *question.encode(), IDS["<eos>"], IDS["<assistant>"]]


class Parameters(dict[str, Tensor]):
    """Tensors by their names in GGUF files."""

    def add(self, name: str, *shape: int, scale: float | None = None, value: float = 0.0) -> None:
        """Add a random matrix, or a vector of a value."""
        data = torch.full(shape, value) if len(shape) == 1 else torch.randn(shape) * (scale or shape[-1] ** -0.5)
        self[name] = data.requires_grad_()


def text_parameters() -> Parameters:
    """Parameters of the text model."""
    p = Parameters()
    p.add("token_embd.weight", N_VOCAB, WIDTH, scale=0.1)
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            p.add(f"blk.{i}.{name}.weight", WIDTH, value=1.0)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            p.add(f"blk.{i}.{name}.weight", WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            p.add(f"blk.{i}.{name}.weight", HIDDEN, WIDTH)
        p.add(f"blk.{i}.ffn_down.weight", WIDTH, HIDDEN)
    p.add("output_norm.weight", WIDTH, value=1.0)
    return p


def vision_parameters() -> Parameters:
    """Parameters of the encoder."""
    p = Parameters()
    p.add("v.patch_embd.weight", WIDTH, 3 * PATCH * PATCH)
    p.add("v.patch_embd.bias", WIDTH)
    p.add("v.position_embd.weight", (SIDE // PATCH) ** 2, WIDTH, scale=0.1)
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            p.add(f"v.blk.{i}.{name}.weight", WIDTH, WIDTH)
            p.add(f"v.blk.{i}.{name}.bias", WIDTH)
        for name, n_out, n_in in (("ffn_up", HIDDEN, WIDTH), ("ffn_down", WIDTH, HIDDEN)):
            p.add(f"v.blk.{i}.{name}.weight", n_out, n_in)
            p.add(f"v.blk.{i}.{name}.bias", n_out)
        for name in ("ln1", "ln2"):
            p.add(f"v.blk.{i}.{name}.weight", WIDTH, value=1.0)
            p.add(f"v.blk.{i}.{name}.bias", WIDTH)
    p.add("v.post_ln.weight", WIDTH, value=1.0)
    p.add("v.post_ln.bias", WIDTH)
    p.add("mm.model.fc.weight", WIDTH, WIDTH * MERGE**2)
    return p


def heads(x: Tensor) -> Tensor:
    """Rows [batch, n, width] by head, [batch, heads, n, head_dim]."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def rotated(x: Tensor) -> Tensor:
    """RoPE of neighbouring pairs."""
    n, dim = x.shape[-2:]
    angles = torch.arange(n)[:, None] * BASE ** (-torch.arange(0, dim, 2) / dim)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack(
        [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
    ).flatten(-2)


def encoded(p: Parameters, patches: Tensor) -> Tensor:
    """Embeddings of pictures, [batch, rows, WIDTH], of their patches."""
    order = torch.from_numpy(
        unfolded(np.zeros((SIDE, SIDE, 3), np.uint8), PATCH, MERGE, (0, 0, 0), (1, 1, 1))[1].astype(np.int64)
    )
    x = (
        functional.linear(patches, p["v.patch_embd.weight"], p["v.patch_embd.bias"])
        + p["v.position_embd.weight"][order]
    )

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"], EPS)

    for i in range(LAYERS):
        b = f"v.blk.{i}"
        normed = norm(f"{b}.ln1", x)
        q, k, v = (heads(linear(f"{b}.{name}", normed)) for name in ("attn_q", "attn_k", "attn_v"))
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + linear(f"{b}.attn_out", seen)
        up = functional.gelu(linear(f"{b}.ffn_up", norm(f"{b}.ln2", x)), approximate="tanh")
        x = x + linear(f"{b}.ffn_down", up)
    merged = norm("v.post_ln", x).reshape(len(x), -1, WIDTH * MERGE**2)
    return functional.linear(merged, p["mm.model.fc.weight"])


def logits(p: Parameters, ids: Tensor, rows: Tensor) -> Tensor:
    """Logits of texts, [batch, n, vocabulary]; embeddings replace ROW."""
    x = p["token_embd.weight"][ids.clamp(min=0)]
    at = (ids[0] == ROW).nonzero()[:, 0]
    x = x.index_copy(1, at, torch.cat([rows, rows], 1))

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (WIDTH,), p[f"{name}.weight"], EPS)

    for i in range(LAYERS):
        b = f"blk.{i}"
        normed = norm(f"{b}.attn_norm", x)
        q, k, v = (heads(normed @ p[f"{b}.{name}.weight"].T) for name in ("attn_q", "attn_k", "attn_v"))
        seen = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + seen.transpose(1, 2).flatten(-2) @ p[f"{b}.attn_output.weight"].T
        normed = norm(f"{b}.ffn_norm", x)
        gate = functional.silu(normed @ p[f"{b}.ffn_gate.weight"].T)
        x = x + (gate * (normed @ p[f"{b}.ffn_up.weight"].T)) @ p[f"{b}.ffn_down.weight"].T
    return norm("output_norm", x) @ p["token_embd.weight"].T


def batch(rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Patches of pictures, ids of texts, and marks of the answers."""
    patches, ids, learned = [], [], []
    for _ in range(BATCH):
        image, question, answer = example(rng)
        pixels = np.asarray(image.resize((SIDE, SIDE), 1))  # Lanczos, as the encoder's own
        patches.append(unfolded(pixels, PATCH, MERGE, (0.5,) * 3, (0.5,) * 3)[0])
        asked, told = prompt(question), [*answer.encode(), IDS["<eos>"]]
        ids.append([*asked, *told])
        learned.append([0] * len(asked) + [1] * len(told))
    length = max(map(len, ids))
    padded = [one + [IDS["<eos>"]] * (length - len(one)) for one in ids]
    wanted = [one + [0] * (length - len(one)) for one in learned]
    return torch.from_numpy(np.stack(patches)), torch.tensor(padded), torch.tensor(wanted)


def train(text: Parameters, vision: Parameters, minutes: float) -> None:
    """Train both with AdamW; the learning rate falls to zero."""
    rng, parameters = random.Random(1), [*text.values(), *vision.values()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    started, step = time.process_time(), 0
    while (part := (time.process_time() - started) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 100) * (1 - part)
        patches, ids, learned = batch(rng)
        found = logits(text, ids[:, :-1], encoded(vision, patches))
        losses = functional.cross_entropy(found.flatten(0, 1), ids[:, 1:].flatten().clamp(min=0), reduction="none")
        weight = learned[:, 1:].flatten()
        loss = (losses * weight).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            right = (found.argmax(-1).flatten() == ids[:, 1:].flatten()) | (weight == 0)
            share = right.view(BATCH, -1).all(1).float().mean()
            print(f"{part:4.0%} step {step} loss {loss:.4f} right {share:.2f}", flush=True)


def write(folder: Path, text: Parameters, vision: Parameters) -> None:
    """Write both files, with matrices of F16."""

    def stored(p: Parameters) -> dict[str, tuple[np.ndarray, Type]]:
        arrays = {name: tensor.detach().numpy() for name, tensor in p.items()}
        arrays = {name: array.reshape(-1, 3, PATCH, PATCH) if name == "v.patch_embd.weight" else array
                  for name, array in arrays.items()}  # fmt: skip
        halves = {name for name, array in arrays.items() if array.ndim > 1 and "embd" not in name}
        return {
            name: (array.astype(np.float16), Type.F16) if name in halves else (array, Type.F32)
            for name, array in arrays.items()
        }

    # Files of byte-level tokens need a merge: that of two zeros, which no text has, makes the last token.
    vocabulary = byte_level([], dict.fromkeys(SPECIAL, CONTROL), eos_token_id=IDS["<eos>"], add_bos_token=False)
    vocabulary["tokenizer.ggml.scores"] = None
    vocabulary["tokenizer.ggml.tokens"] = [*vocabulary["tokenizer.ggml.tokens"], "\u0100\u0100"]
    vocabulary["tokenizer.ggml.token_type"] = [*map(int, vocabulary["tokenizer.ggml.token_type"]), 1]
    vocabulary["tokenizer.ggml.merges"] = ["\u0100 \u0100"]
    llama = {
        "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": HIDDEN, "context_length": 512,
        "attention.head_count": HEADS, "attention.head_count_kv": HEADS, "attention.layer_norm_rms_epsilon": EPS,
        "rope.dimension_count": WIDTH // HEADS, "rope.freq_base": BASE, "vocab_size": N_VOCAB,
    }  # fmt: skip
    keys = {f"llama.{key}": value for key, value in llama.items()}
    names = {"general.name": "shapes", "tokenizer.chat_template": TEMPLATE}
    write_gguf(folder / "shapes.gguf", "llama", names | keys | vocabulary, stored(text))
    clip = {
        "embedding_length": WIDTH, "attention.head_count": HEADS, "feed_forward_length": HIDDEN, "block_count": LAYERS,
        "image_size": SIDE, "patch_size": PATCH, "projection_dim": WIDTH, "attention.layer_norm_epsilon": EPS,
        "projector.scale_factor": MERGE, "preproc_image_size": SIDE, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    about = {
        "general.type": "mmproj", "general.name": "shapes", "clip.has_vision_encoder": True, "clip.use_gelu": True,
        "clip.projector_type": "idefics3",
    }  # fmt: skip
    keys = {f"clip.vision.{key}": value for key, value in clip.items()}
    write_gguf(folder / "mmproj-shapes.gguf", "clip", about | keys, stored(vision))


def main() -> None:
    """Train for the minutes of the arguments, of one core."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text, vision = text_parameters(), vision_parameters()
    train(text, vision, given.minutes)
    given.folder.mkdir(parents=True, exist_ok=True)
    write(given.folder, text, vision)


if __name__ == "__main__":
    main()
