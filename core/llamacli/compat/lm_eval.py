"""Model of EleutherAI's lm-evaluation-harness (`pip install lm-eval`), in this process.

    import lm_eval
    from llamacli.compat.lm_eval import HarnessModel

    with llamacli.load_model("model.gguf") as model:
        results = lm_eval.simple_evaluate(model=HarnessModel(model), tasks=["lambada_openai"])

`llamacli serve` answers the harness's `local-completions` too. Scores do not depend on the order of the requests.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llamacli.errors import InvalidRequestError
from llamacli.model import Model
from llamacli.sampling import SamplingParams
from llamacli.util.sampling_params import PARAMETERS

MAX_TOKENS = 256
"""Tokens of a generated text, unless a task sets `max_gen_toks`."""


@attrs.frozen(eq=False)
class _Scored:
    """Log-probability of a continuation; True if it is the greedy one."""

    logprob: float
    is_greedy: bool


class HarnessModel(TemplateLM):
    """Loaded model for `lm_eval.simple_evaluate` and `lm_eval.evaluate`.

    `add_bos` puts BOS before each text; None, the default, does as the model's file says. `n_parallel` texts are
    generated together. Prompts that begin alike share the prefix cache of the model.
    """

    def __init__(self, model: Model, *, add_bos: bool | None = None, n_parallel: int = 8, seed: int = 1234):
        super().__init__()
        self.model, self.n_parallel, self.seed = model, n_parallel, seed
        self._add_bos, self.max_length = add_bos, model.config.n_ctx

    @property
    def eot_token_id(self) -> int:
        """Id of the end of a text. Raises InvalidRequestError without one."""
        found = self.model.tokenizer.eos_id
        if found is None:
            raise InvalidRequestError("the vocabulary has no end-of-text token")
        return found

    @property
    def prefix_token_id(self) -> int:
        """Id before a text without context: BOS, else the end's."""
        bos = self.model.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name for the cache of requests."""
        return self.model.identity

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, special tokens by their spelling."""
        special = self._add_bos if add_special_tokens is None else add_special_tokens
        ids = self.model.tokenizer.encode_prompt(string, parse_special=True)
        bos = self.model.tokenizer.bos_id
        if bos is None or special is None:
            return ids[1:] if ids[:2] == [bos, bos] else ids  # chat templates may write BOS themselves
        rest = list(itertools.dropwhile(lambda token: token == bos, ids))
        return [bos, *rest] if special else rest

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Chat template's source, for the harness's record."""
        return self.model.create_chat_codec(chat_template if isinstance(chat_template, str) else None).template.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Text of a conversation by the model's chat template. Raises ChatTemplateError."""
        rendering = self.model.create_chat_codec().render(chat_history, add_generation_prompt=add_generation_prompt)
        return rendering.prompt

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        scored = (self._scored(context, continuation) for _, context, continuation in requests)
        return [(one.logprob, one.is_greedy) for one in scored]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts, in windows of the context's length."""
        return [self._rolling(*request.args) for request in requests]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the stop strings, `until`, of each request.

        Raises InvalidRequestError for an argument of generation that has no meaning here.
        """
        texts: dict[int, str] = {}
        keys = [json.dumps(request.args[1], sort_keys=True) for request in requests]
        for key in dict.fromkeys(keys):
            places = [i for i, other in enumerate(keys) if other == key]
            texts |= zip(places, self._generated([requests[i].args[0] for i in places], json.loads(key)), strict=True)
        return [texts[i] for i in range(len(requests))]

    def _scored(self, context: Sequence[int], continuation: Sequence[int]) -> _Scored:
        ids = [*context, *continuation][-self.max_length - 1 :]
        n_scored = min(len(continuation), len(ids) - 1)
        with self.model.create_session() as session:
            if len(ids) - 1 > n_scored:
                session.eval(ids[: -n_scored - 1])
            rows = np.asarray(session.eval(ids[-n_scored - 1 : -1], all_logits=True))
        wanted = np.array(ids[-n_scored:])
        shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
        logprobs = shifted[np.arange(n_scored), wanted] - np.log(np.exp(shifted).sum(axis=1))
        return _Scored(float(logprobs.sum()), bool((rows.argmax(axis=1) == wanted).all()))

    def _rolling(self, text: str) -> float:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text, add_special_tokens=False),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return sum(self._scored(*make_disjoint_window(window)).logprob for window in windows)

    def _generated(self, contexts: Sequence[str], arguments: Mapping[str, Any]) -> Iterable[str]:
        given = dict(arguments)
        until, limit = given.pop("until", None) or [], int(given.pop("max_gen_toks", MAX_TOKENS))
        if not given.pop("do_sample", given.get("temperature", 0) > 0):
            given.pop("temperature", None)
        if unknown := sorted(given.keys() - PARAMETERS.keys()):
            raise InvalidRequestError(f"generation_kwargs: {', '.join(unknown)} is not known")
        params = SamplingParams(stop=until, **given)
        room = self.max_length - limit
        if room < 1:
            raise InvalidRequestError(f"max_gen_toks {limit} leaves no room in a context of {self.max_length} tokens")
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        replies = self.model.generate(prompts, params, max_tokens=limit, n_parallel=self.n_parallel, seed=self.seed)
        return [reply.text for reply in replies]
