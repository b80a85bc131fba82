"""Train the demo model and export it as GGUF.

python tools/demo/train.py

It is trained on stories first, and then on conversations and some more stories. Every seed is fixed. See README.md for
what it needs and how long it takes.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from chats import Message, converse, converse_on
from stories import generate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gguf

OUTPUT = Path(__file__).parents[2] / "core" / "llamacli" / "data" / "demo.gguf"
BEGIN, END = 0, 1
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")  # the last ids of the vocabulary
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
HELD_OUT = range(10_000_000, 10_000_128)  # seeds of the validation texts

OPENING = 24  # tokens of a story in a conversation that count as much as answers: most name the hero
SHORT_REPLY = 70  # tokens of an answer; replies that are longer are stories
ANSWER_WEIGHT = 3.0  # of a token of an answer, where one of a story has 1
CHATS_KEPT = 0.57  # part of the conversations that is trained on: those with the most answers

Row = tuple[list[int], list[float]]  # tokens, and their weights in the loss


@dataclass(frozen=True)
class Config:
    """Hyperparameters of model and training.

    Widths are multiples of 32, the block of Q8_0.
    """

    n_vocab: int = 2048
    n_ctx: int = 1024
    n_embd: int = 192
    n_layer: int = 6
    n_head: int = 6
    n_head_kv: int = 2
    n_ff: int = 512
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    n_stories: int = 60_000
    n_chats: int = 32_000
    n_series: int = 8_000
    stories_per_chat: float = 0.25
    batch: int = 4  # rows of each process
    learning_rate: float = 2.5e-3
    learning_rate_chats: float = 2e-3
    warmup: int = 100

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
    """Causal attention."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


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

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """[batch, tokens] ids to the logits [wanted, n_vocab] of those wanted."""
        x = self.token_embd(tokens)
        rope = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blk:
            x = block(x, rope)
        return functional.linear(self.output_norm(x[wanted]), self.token_embd.weight)


def byte_level(model: models.BPE) -> Tokenizer:
    """Byte-level tokenizer of a BPE model."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: list[str], n_vocab: int) -> Tokenizer:
    """Train a byte-level BPE that covers every byte.

    Ids 0 and 1 are BOS and EOS, the last ones are CHAT_TOKENS.
    """
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - len(CHAT_TOKENS),
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(CHAT_TOKENS))
    return tokenizer


def story_rows(tokenizer: Tokenizer, texts: list[str]) -> list[Row]:
    """Encode stories with BOS and EOS; all of it is learned."""
    rows = [[BEGIN, *encoding.ids, END] for encoding in tokenizer.encode_batch(texts)]
    return [(row, [1.0] * len(row)) for row in rows]


def chat_rows(tokenizer: Tokenizer, chats: list[list[Message]], n_ctx: int) -> list[Row]:
    """Encode conversations as CHAT_TEMPLATE renders them; replies are learned.

    Of those longer than `n_ctx` tokens the oldest turns are left out, as `llamacli run` does, and the answers about
    their stories are not learned.
    """
    vocabulary = tokenizer.get_vocab()
    start, end = (vocabulary[token] for token in CHAT_TOKENS)
    texts = {f"{m.role}\n{m.content}" for chat in chats for m in chat} | {"assistant\n", "\n"}
    ids = dict(zip(texts, (found.ids for found in tokenizer.encode_batch(list(texts))), strict=True))
    newline, n_header = ids["\n"], len(ids["assistant\n"])
    rows = []
    for chat in chats:
        turns: list[Row] = [([BEGIN], [0.0])]  # what comes before the first request, then each request with its reply
        for message in chat:
            text = ids[f"{message.role}\n{message.content}"]
            n_reply = len(text) - n_header + 1 if message.role == "assistant" else 0
            n_heavy = min(n_reply, OPENING) if n_reply > SHORT_REPLY else n_reply
            if message.role == "user":
                turns.append(([], []))
            turns[-1][0].extend([start, *text, end, *newline])
            turns[-1][1].extend([0.0] * (len(text) + 2 - n_reply) + [ANSWER_WEIGHT] * n_heavy)
            turns[-1][1].extend([1.0] * (n_reply - n_heavy) + [0.0] * len(newline))
        rows.append(trimmed(turns, n_ctx))
    return rows


def trimmed(turns: list[Row], n_ctx: int) -> Row:
    """Join the first turn and the latest that fit into `n_ctx` tokens."""
    first, *rest = turns
    while len(first[0]) + sum(len(tokens) for tokens, _ in rest) > n_ctx:
        del rest[0]
    story = next((i for i, (_, weights) in enumerate(rest) if 1.0 in weights), 0) if len(rest) < len(turns) - 1 else 0
    rest[:story] = [(tokens, [0.0] * len(tokens)) for tokens, _ in rest[:story]]
    return [i for row in (first, *rest) for i in row[0]], [w for row in (first, *rest) for w in row[1]]


def share_of_answers(row: Row) -> float:
    """Part of a conversation's tokens that are answers."""
    return row[1].count(ANSWER_WEIGHT) / len(row[0])


def batches(rows: list[Row], size: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs, targets and weights [size, tokens].

    Rows of similar length share a batch to avoid padding.
    """
    rng = random.Random(seed)
    rows = rng.sample(rows, len(rows))
    window = 32 * size
    for start in range(0, len(rows), window):
        near = sorted(rows[start : start + window], key=lambda row: len(row[0]))
        groups = [near[i : i + size] for i in range(0, len(near), size)]
        for group in rng.sample(groups, len(groups)):
            shape = len(group), len(group[-1][0])
            tokens, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
            for i, row in enumerate(group):
                tokens[i, : len(row[0])], weights[i, : len(row[1])] = row
            inputs = torch.from_numpy(tokens)
            yield inputs[:, :-1], inputs[:, 1:], torch.from_numpy(weights)[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, weights: Tensor, *, half: bool = False) -> Tensor:
    """Weighted mean of the cross entropy in nats per token."""
    learned = weights > 0
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        logits = model(inputs, learned)
    losses = functional.cross_entropy(logits.float(), targets[learned], reduction="none")
    return (losses * weights[learned]).sum() / weights.sum()


def train(
    model: Llama, tokenizer: Tokenizer, rows: list[Row], learning_rate: float, c: Config, options: argparse.Namespace
) -> None:
    """Train for one epoch, each batch divided over `options.processes`.

    A process has one thread: several threads of one process wait for each other in each of the small products.
    """
    model.share_memory()
    with tempfile.TemporaryDirectory() as folder:
        arguments = folder, model, tokenizer.to_str(), rows, learning_rate, c, options
        torch.multiprocessing.spawn(train_share, arguments, options.processes)


def train_share(
    rank: int,
    folder: str,
    shared: Llama,
    tokenizer: str,
    rows: list[Row],
    learning_rate: float,
    c: Config,
    options: argparse.Namespace,
) -> None:
    """Train on one process's share of each batch.

    Matrices are trained by Muon (https://kellerjordan.github.io/posts/muon/), embedding and norms by AdamW, with warmup
    and cosine decay. The first process writes a file named after `options.f32` and the step every 100 steps, and the
    trained weights to `shared`.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=options.processes)
    model = Llama(c)
    model.load_state_dict(shared.state_dict())
    if not options.eager:
        for i in range(c.n_layer):
            model.blk[i].compile(dynamic=True)
    parallel = DistributedDataParallel(model)
    matrices = [p for p in model.blk.parameters() if p.dim() == 2]
    others = [model.token_embd.weight, *(p for p in model.parameters() if p.dim() == 1)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        torch.optim.AdamW(matrices, learning_rate, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
        if options.eager  # Muon's products are in bfloat16, which few CPUs have
        else torch.optim.Muon(matrices, learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    size = c.batch * options.processes
    steps = len(rows) // size
    start = time.perf_counter()
    tokens = 0
    for step, (inputs, targets, weights) in enumerate(batches(rows[: steps * size], size, seed=1)):
        seconds = time.perf_counter() - start
        done = max(step / steps, seconds / (60 * options.minutes))
        if done >= 1:
            break
        cosine = 0.5 + 0.5 * math.cos(math.pi * done)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate * min((step + 1) / min(c.warmup, steps // 10), cosine)
        share = slice(rank, None, options.processes)
        loss = loss_of(parallel, inputs[share], targets[share], weights[share], half=not options.eager)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens += inputs.numel()
        if rank == 0 and (step % 100 == 0 or step == steps - 1):
            print(f"step {step}/{steps} loss {loss.item():.4f} tokens {tokens} seconds {seconds:.0f}", flush=True)
            if options.f32:
                path = options.f32.with_stem(f"{options.f32.stem}-{step}")
                export(model, Tokenizer.from_str(tokenizer), c, path, gguf.GGMLQuantizationType.F32)
    if rank == 0:
        shared.load_state_dict(model.state_dict())
    distributed.destroy_process_group()


def validate(model: Llama, held_out: dict[str, list[Row]], c: Config) -> None:
    """Print the mean loss on held-out stories and conversations."""
    with torch.no_grad():
        for name, rows in held_out.items():
            losses = [loss_of(model, *batch).item() for batch in batches(rows, c.batch, seed=0)]
            print(f"held-out loss of {name} {sum(losses) / len(losses):.4f}", flush=True)


def export(model: Llama, tokenizer: Tokenizer, c: Config, path: Path, matrices: gguf.GGMLQuantizationType) -> None:
    """Write the GGUF file: matrices in the given type, norms in F32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("llamacli demo stories")
    writer.add_description("A small model of the llamacli project that tells little stories and answers questions")
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
    controls = {BEGIN, END, *(vocabulary[token] for token in CHAT_TOKENS)}
    writer.add_token_types([control if i in controls else normal for i in range(c.n_vocab)])
    writer.add_token_merges([" ".join(pair) for pair in merges(tokenizer)])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(vocabulary[CHAT_TOKENS[1]])
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

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


def load_trained(path: Path, model: Llama, c: Config) -> Tokenizer:
    """Load the weights of an exported file into the model.

    Returns the tokenizer. A file without CHAT_TOKENS gets them instead of its last tokens.
    """
    reader = gguf.GGUFReader(path)
    n_normal = c.n_vocab - len(CHAT_TOKENS)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()[:n_normal]
    pairs = [tuple(text.split(" ")) for text in reader.fields["tokenizer.ggml.merges"].contents()]
    pairs = [pair for pair in pairs if "".join(pair) in set(tokens)]
    tokenizer = byte_level(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.add_special_tokens([tokens[BEGIN], tokens[END], *CHAT_TOKENS])
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            parameters[tensor.name].copy_(torch.from_numpy(np.array(values)))
    return tokenizer


def merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The merges of a BPE tokenizer, in order."""
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("--f32", type=Path, help="write the model in F32 as well, to compare exactly")
    parser.add_argument("--stories", type=int, default=Config.n_stories, help="how many stories to train on")
    parser.add_argument("--chats", type=int, default=Config.n_chats, help="how many conversations to generate")
    parser.add_argument("--series", type=int, default=Config.n_series, help="how many with several stories")
    parser.add_argument("--first", type=int, default=0, help="seed of the first conversation")
    parser.add_argument("--rate", type=float, default=Config.learning_rate_chats, help="learning rate of conversations")
    parser.add_argument("--start", type=Path, help="model file to start from, without training on stories alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop training after so many minutes")
    parser.add_argument("--eager", action="store_true", help="in F32 and without a compiler: best of few steps")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()

    config = Config(
        n_stories=options.stories, n_chats=options.chats, n_series=options.series, learning_rate_chats=options.rate
    )
    torch.manual_seed(1)
    model = Llama(config)
    if options.start:
        tokenizer = load_trained(options.start, model, config)
    else:
        texts = [generate(seed).text for seed in range(config.n_stories)]
        tokenizer = train_tokenizer(texts[:20_000], config.n_vocab)
        train(model, tokenizer, story_rows(tokenizer, texts), config.learning_rate, config, options)
    n_plain = int(config.n_chats * config.stories_per_chat)
    with multiprocessing.Pool(options.processes) as pool:
        first = config.n_stories + options.first
        plain = pool.map(text_of, range(first, first + n_plain), 64)
        chats = pool.map(converse, range(options.first, options.first + config.n_chats), 64)
        series = pool.map(converse_on, range(options.first, options.first + config.n_series), 64)
    dialogues = sorted(chat_rows(tokenizer, chats, config.n_ctx), key=share_of_answers, reverse=True)
    rows = story_rows(tokenizer, plain) + dialogues[: int(CHATS_KEPT * len(dialogues))]
    rows += chat_rows(tokenizer, series, config.n_ctx)
    held_out = {
        "stories": story_rows(tokenizer, [text_of(seed) for seed in HELD_OUT]),
        "chats": chat_rows(tokenizer, [converse(seed) for seed in HELD_OUT], config.n_ctx),
        "series": chat_rows(tokenizer, [converse_on(seed) for seed in HELD_OUT], config.n_ctx),
    }
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, {sum(len(row[0]) for row in rows)} tokens,"
        f" {len(rows)} rows, longest {max(len(row[0]) for row in rows)}",
        flush=True,
    )
    train(model, tokenizer, rows, config.learning_rate_chats, config, options)
    validate(model, held_out, config)
    export(model, tokenizer, config, options.output, gguf.GGMLQuantizationType.Q8_0)
    if options.f32:
        export(model, tokenizer, config, options.f32, gguf.GGMLQuantizationType.F32)


def text_of(seed: int) -> str:
    """The text of the story of a seed."""
    return generate(seed).text


if __name__ == "__main__":
    main()
