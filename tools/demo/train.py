"""Train the demo model and export it as GGUF.

python tools/demo/train.py

Every seed is fixed. See README.md for what it needs and how long it takes.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from stories import generate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

import gguf

OUTPUT = Path(__file__).parents[2] / "core" / "llamacli" / "data" / "demo.gguf"
BEGIN, END = 0, 1
PADDING = -100  # cross_entropy ignores it
HELD_OUT = range(10_000_000, 10_000_512)  # seeds of the validation stories


@dataclass(frozen=True)
class Config:
    """Hyperparameters of model and training.

    Widths are multiples of 32, the block of Q8_0.
    """

    n_vocab: int = 2048
    n_ctx: int = 512
    n_embd: int = 192
    n_layer: int = 6
    n_head: int = 6
    n_head_kv: int = 2
    n_ff: int = 512
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    n_stories: int = 60_000
    batch: int = 8
    learning_rate: float = 2.5e-3
    warmup: int = 200

    @property
    def n_rot(self) -> int:
        """Head dimension."""
        return self.n_embd // self.n_head


class Block(nn.Module):
    """Pre-norm transformer block: grouped-query attention with RoPE, then SwiGLU."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.heads_kv = c.n_head, c.n_head_kv
        self.attn_norm = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.attn_q = nn.Linear(c.n_embd, c.n_head * c.n_rot, bias=False)
        self.attn_k = nn.Linear(c.n_embd, c.n_head_kv * c.n_rot, bias=False)
        self.attn_v = nn.Linear(c.n_embd, c.n_head_kv * c.n_rot, bias=False)
        self.attn_output = nn.Linear(c.n_head * c.n_rot, c.n_embd, bias=False)
        self.ffn_norm = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.ffn_gate = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_up = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_down = nn.Linear(c.n_ff, c.n_embd, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, tokens, n_embd] to the same shape."""
        y = self.attn_norm(x)
        q = rotate(split_heads(self.attn_q(y), self.heads), rope)
        k = rotate(split_heads(self.attn_k(y), self.heads_kv), rope)
        v = split_heads(self.attn_v(y), self.heads_kv)
        repeat = self.heads // self.heads_kv
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        x = x + self.attn_output(attend(q, k, v).transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.ffn_down(functional.silu(self.ffn_gate(y)) * self.ffn_up(y))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads * size] to [batch, heads, tokens, size]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of adjacent pairs, as in `llama` GGUF files."""
    cos, sin = rope[0].to(x.dtype), rope[1].to(x.dtype)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention without a fused kernel, which is slower at this size."""
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
    future = torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype).triu(1)
    return (scores + future).softmax(-1, dtype=v.dtype) @ v


class Llama(nn.Module):
    """Llama with tied embedding; parameters are named as in GGUF."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(c.n_vocab, c.n_embd)
        self.blk = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.output_norm = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        frequency = c.rope_base ** (-torch.arange(0, c.n_rot, 2) / c.n_rot)
        angle = torch.arange(c.n_ctx)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(parameter, std=0.04 / math.sqrt(2 * c.n_layer) if into_stream else 0.04)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] ids to logits [batch, tokens, n_vocab]."""
        x = self.token_embd(tokens)
        rope = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blk:
            x = block(x, rope)
        return functional.linear(self.output_norm(x), self.token_embd.weight)


def train_tokenizer(texts: list[str], n_vocab: int) -> Tokenizer:
    """Train a byte-level BPE that covers every byte.

    Ids 0 and 1 are BOS and EOS.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encode texts with BOS and EOS."""
    return [[BEGIN, *encoding.ids, END] for encoding in tokenizer.encode_batch(texts)]


def batches(stories: list[list[int]], size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets [size, tokens], one story per row.

    Stories of similar length share a batch to avoid padding.
    """
    rng = random.Random(seed)
    stories = rng.sample(stories, len(stories))
    window = 32 * size
    for start in range(0, len(stories), window):
        near = sorted(stories[start : start + window], key=len)
        groups = [near[i : i + size] for i in range(0, len(near), size)]
        for group in rng.sample(groups, len(groups)):
            longest = max(map(len, group))
            rows = np.full((len(group), longest), PADDING)
            for row, story in zip(rows, group, strict=True):
                row[: len(story)] = story
            tokens = torch.from_numpy(rows)
            yield tokens[:, :-1].clamp(min=0), tokens[:, 1:]


def loss_of(model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PADDING)


def train(model: Llama, stories: list[list[int]], held_out: list[list[int]], c: Config) -> None:
    """Train for one epoch with AdamW, warmup and cosine decay."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=c.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    steps = math.ceil(len(stories) / c.batch)
    start = time.perf_counter()
    tokens = 0
    for step, (inputs, targets) in enumerate(batches(stories, c.batch, seed=1)):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = c.learning_rate * min((step + 1) / c.warmup, cosine)
        loss = loss_of(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int((targets != PADDING).sum())
        if step % 100 == 0 or step == steps - 1:
            seconds = time.perf_counter() - start
            print(f"step {step}/{steps} loss {loss.item():.4f} tokens {tokens} seconds {seconds:.0f}", flush=True)
    with torch.no_grad():
        losses = [loss_of(model, *batch).item() for batch in batches(held_out, c.batch, seed=0)]
    print(f"held-out loss {sum(losses) / len(losses):.4f}", flush=True)


def export(model: Llama, tokenizer: Tokenizer, c: Config, path: Path, matrices: gguf.GGMLQuantizationType) -> None:
    """Write the GGUF file: matrices in the given type, norms in F32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("llamacli demo stories")
    writer.add_description("A small model that tells little stories, made by tools/demo of the llamacli project")
    writer.add_license("MIT")
    writer.add_languages(["en"])
    writer.add_size_label(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")
    writer.add_float32("general.sampling.temp", 0.8)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_context_length(c.n_ctx)
    writer.add_embedding_length(c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_feed_forward_length(c.n_ff)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_head_kv)
    writer.add_rope_dimension_count(c.n_rot)
    writer.add_rope_freq_base(c.rope_base)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_vocab_size(c.n_vocab)
    quantized = matrices == gguf.GGMLQuantizationType.Q8_0
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantized else gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    vocabulary = tokenizer.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    writer.add_token_types([control if i in (BEGIN, END) else normal for i in range(c.n_vocab)])
    writer.add_token_merges([" ".join(pair) for pair in merges(tokenizer)])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)

    for name, parameter in model.named_parameters():
        array = parameter.detach().float().numpy()
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, matrices), raw_dtype=matrices)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The merges of a BPE tokenizer, in order."""
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("--f32", type=Path, help="write the model in F32 as well, to compare exactly")
    parser.add_argument("--stories", type=int, default=Config.n_stories, help="how many stories to train on")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    config = Config(n_stories=options.stories)
    torch.manual_seed(1)
    torch.set_num_threads(options.threads)
    texts = [generate(seed).text for seed in range(config.n_stories)]
    tokenizer = train_tokenizer(texts[:20_000], config.n_vocab)
    stories = encode(tokenizer, texts)
    held_out = encode(tokenizer, [generate(seed).text for seed in HELD_OUT])
    model = Llama(config)
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, {sum(map(len, stories))} tokens,"
        f" longest story {max(map(len, stories))}",
        flush=True,
    )
    train(model, stories, held_out, config)
    export(model, tokenizer, config, options.output, gguf.GGMLQuantizationType.Q8_0)
    if options.f32:
        export(model, tokenizer, config, options.f32, gguf.GGMLQuantizationType.F32)


if __name__ == "__main__":
    main()
