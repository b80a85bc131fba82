"""Sessions: sampling and generation of text over one token stream."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from types import NoneType
from typing import Any

from llamacli.engine.adapters import AdaptersLike
from llamacli.engine.compiled_model import CompiledModel, KVTypes
from llamacli.errors import InvalidRequestError, SessionBusyError, StateError, expect_path, expect_type
from llamacli.generation.costs import StepCost
from llamacli.generation.drafters import MAX_DRAFT
from llamacli.generation.drafting import Draft, Drafter, hidden_taker
from llamacli.generation.loop import Stats, generate, token_limit
from llamacli.generation.stream import TokenStream
from llamacli.generation.text import Token, TokenText
from llamacli.inputs import Contents, Inputs, tokens_of
from llamacli.kv import CacheStrategy, KVSequence, snapshot
from llamacli.sampling import Candidates, LogProbs, SamplerChain, SamplerState, SamplingParams
from llamacli.tokenizer import StreamDecoder
from llamacli.util.asynchronous import in_threads
from llamacli.util.foreign_names import explain_names
from llamacli.util.locking import locked
from llamacli.util.numbers import is_integer

_BUSY = "the session is in another generate that has not ended: go through its tokens, or close() it"


class Session(TokenStream, contextlib.AbstractContextManager["Session"]):
    """Token stream over a model, with its KV cache, sampler and logits.

    Sessions of one model never affect each other's results. Calls from several threads wait for one another; `close`
    too waits for the evaluation that another thread is in. `copy.copy` and `copy.deepcopy` fork. `llamacli.TokenStream`
    describes the attributes and methods of its tokens, cache and logits.

    - `stats`: counts and rates of the last `generate`.
    - `stop_string`: the stop string that ended the last `generate`, "" if none did.
    - `drafter`: proposer of tokens that `generate` uses by default (speculative decoding); may be set, None for none.
    - `step_cost`: the time of its steps with a drafter, by which the length of drafts is chosen.
    """

    text: TokenText | None = None

    def __init__(
        self,
        model: CompiledModel,
        *,
        n_ctx: int | None = None,
        kv_type: KVTypes | None = None,
        seed: int | None = 1234,
        strategy: str | CacheStrategy = CacheStrategy.ALWAYS,
        reuse: bool = True,
        adapters: AdaptersLike | None = None,
        sequence: KVSequence | None = None,
    ):
        """Create a session, as `Model.create_session` does, or continue a `sequence`.

        Its cells must be of the same adapters.
        """
        super().__init__(
            model,
            n_ctx=n_ctx,
            kv_type=kv_type,
            strategy=strategy,
            reuse=reuse,
            adapters=adapters,
            sequence=sequence,
        )
        self.stats = Stats()
        self.stop_string = ""
        self._drafter: Drafter | None = None
        self.step_cost = StepCost()
        self._sampler = SamplerState(_checked_seed(seed), model.tokenizer, model.find_sampler)
        self._params: SamplingParams | SamplerChain = SamplingParams()
        self._generation: object | None = None

    @property
    def params(self) -> SamplingParams | SamplerChain:
        """Default sampling parameters; greedy until set.

        Setting raises InvalidRequestError, changing nothing, if they are invalid.
        """
        return self._params

    @params.setter
    @locked
    def params(self, params: SamplingParams | SamplerChain) -> None:
        self._sampler.use(params)
        self._params = params

    @property
    def drafter(self) -> Drafter | None:
        """Default proposer of tokens of `generate`, or None; may be set."""
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._take_hidden = hidden_taker(drafter if self.draft is None else self.draft.drafter)

    @property
    def steer(self) -> Callable[[Candidates], None] | None:
        """Function that changes the candidates of each draw, or None.

        May be set. It is called after grammars, bans and the logit bias, before all other samplers. Forks do not
        inherit it.
        """
        return self._sampler.steer

    @steer.setter
    def steer(self, steer: Callable[[Candidates], None] | None) -> None:
        if steer is not None and not callable(steer):
            raise InvalidRequestError(f"steer must be a function of candidates or None, not {steer!r}")
        self._sampler.steer = steer

    @property
    def candidates(self) -> Candidates:
        """Candidates of the last draw, as the samplers left them.

        Raises InvalidRequestError if nothing has been drawn.
        """
        return self._sampler.candidates

    @property
    def logprobs(self) -> LogProbs | None:
        """Log-probabilities of the last draw, where `n_probs` asks for them, else None."""
        return self._sampler.logprobs

    def set_seed(self, seed: int | None) -> int:
        """Seed the random generator: the same seed gives the same draws.

        None and -1 are a random seed. Returns the seed.
        """
        seed = _checked_seed(seed)
        self._sampler.set_seed(seed)
        return seed

    @locked
    def reset_sampler(self) -> None:
        """Clear the accepted tokens that penalties and grammars count."""
        self._sampler.reset()

    @locked
    def fork(self, sequence: KVSequence | None = None) -> Session:
        """Copy this session: same tokens, logits, sampler and draws.

        Pages are shared. The copy is in `sequence`, which must hold the same tokens already, or in one of its own.
        """
        expect_type(sequence, (KVSequence, NoneType), "sequence", "a KVSequence")
        sequence = self.cache.fork() if sequence is None else sequence
        child = Session(
            self.model,
            sequence=sequence,
            strategy=self.strategy,
            reuse=self._prefixes is not None,
            adapters=self.adapters,
        )
        child._tokens, child._n_prompt, child._contents = list(self._tokens), self._n_prompt, self._contents.copy()
        child._logits = None if self._logits is None else self._logits.copy()
        child._sampler, child._params = self._sampler.clone(), self._params
        child.n_reused = self.n_reused
        return child

    def __copy__(self) -> Session:
        """Fork: a session's cache cannot be shared by two sessions."""
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """Fork, with the same model."""
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError("a session belongs to a model in memory and cannot be pickled: use save_state and load_state")

    def __repr__(self) -> str:
        if self._cache is None or self._cache.closed:
            return "<Session, closed>"
        return f"<Session, {self.n_past} of {self.n_ctx} tokens, cache {self._cache.kv_type}>"

    @locked
    def sample(self, params: SamplingParams | SamplerChain | None = None) -> int:
        """Draw and `accept` the next token, changing `logits` in place.

        In place as llama.cpp's samplers work on their candidates: afterwards `logits` show what penalties and
        temperature have made of them, and a second `sample` begins with that. `draw` leaves them alone. The token is
        not evaluated: pass it to `eval`.
        """
        token = self._sampler.sample(self.logits, self.params if params is None else params)
        self.accept(token)
        return token

    @locked
    def legal(self, params: SamplingParams | SamplerChain | None = None) -> Candidates:
        """Tokens that grammars and bans leave to `draw`.

        The candidates have their `logits`. Raises InvalidRequestError if there is no such token, or if there are no
        logits.
        """
        return self._sampler.legal(self.logits, self.params if params is None else params)

    def accept(self, token: int) -> None:
        """Count a token as generated, for penalties and grammars.

        It is not evaluated: pass it to `eval`. Raises InvalidRequestError, changing nothing, if it is not in the
        vocabulary or the grammar does not allow it.
        """
        n_vocab = self.model.config.n_vocab
        if (type(token) is not int and not is_integer(token)) or not 0 <= token < n_vocab:
            raise InvalidRequestError(f"token {token!r} is not an id from 0 to {n_vocab - 1}")
        with self.lock:
            self._sampler.accept(int(token))

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of text that is to follow the session's tokens.

        At the beginning that is a prompt (`Model.encode_prompt`); later on it is neither given BOS nor the
        space that some tokenizers put first. With `parse_special`, spelled special tokens become their ids. Raises
        TokenizerError if the vocabulary cannot express the text.
        """
        tokenizer = self.model.tokenizer
        if not self._tokens:
            return self.model.encode_prompt(text, parse_special=parse_special)
        if not parse_special:
            return tokenizer.encode_run(text, continues=True)
        ids: list[int] = []
        for part in tokenizer.split(text, tokenizer.special_ids):
            ids += [part] if isinstance(part, int) else tokenizer.encode_run(part, continues=True)
        return ids

    def decoder(self) -> StreamDecoder:
        """Incremental decoder for the tokens to come.

        Its text continues the text of `tokens`.
        """
        return self.model.tokenizer.stream([token for token in self._tokens if token >= 0])

    @explain_names
    def generate(
        self,
        prompt: str | Sequence[int] | Inputs,
        params: SamplingParams | SamplerChain | None = None,
        *,
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        speculate: Drafter | None = None,
    ) -> Generator[Token, None, None]:
        """Evaluate `prompt`, then yield up to `max_tokens` tokens as they are drawn.

        The prompt is token ids, an `Inputs`, or text, which is tokenized as `encode` does: special tokens in it stay
        text. In an encoder-decoder model the first prompt is the encoder's text (`Model.encoder_inputs`), and what is
        generated begins with `config.decoder_start`; later prompts are the decoder's. With None or -1 for `max_tokens`
        the text goes on until it ends or the context is full.

        A token is accepted when the next one is asked for: only then is it counted, remembered for penalties and
        evaluated, the last one too. Leaving the loop therefore drops the token in hand. Generation ends at an
        end-of-generation token, which is neither yielded nor evaluated, unless `ignore_eos`; and quietly when the
        context is full (`n_past == n_ctx`).

        With stop strings in `params` the text ends before the first that comes, which `stop_string` then is; tokens
        that hold a part of it are not in the context afterwards. A token comes once its text is certain to be before a
        stop string, so a few later ones may have been evaluated by then.

        `speculate` proposes tokens that are evaluated together (speculative decoding), which can be faster and never
        changes the text: see `llamacli.generation.drafters`. The default is `drafter`.

        Raises what `eval` raises for the prompt, and what is wrong with `params`, at once; an empty prompt continues
        from `logits`. SessionBusyError if another `generate` of this session has begun and not ended: go through it, or
        `close` it. The loop itself is `llamacli.generation.loop.generate`.
        """
        if self._generation is not None:
            raise SessionBusyError(_BUSY)
        params = self.params if params is None else params
        limit = token_limit(max_tokens, self.n_ctx)
        begun = self.encode(prompt) if isinstance(prompt, str) else prompt
        if not self._tokens and not isinstance(begun, Inputs):
            begun = self.model.prompt_inputs(begun)
        ids = self._checked(begun)
        drafter = self.drafter if speculate is None else speculate
        if drafter is not None:
            drafter.begin(self.model)
        self._sampler.use(params)
        self.stop_string = ""
        return generate(self, ids, params, max_tokens=limit, ignore_eos=ignore_eos, speculate=drafter)

    @explain_names
    def generate_async(
        self,
        prompt: str | Sequence[int] | Inputs,
        params: SamplingParams | SamplerChain | None = None,
        *,
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        speculate: Drafter | None = None,
    ) -> AsyncGenerator[Token, None]:
        """Generate tokens for `async for`, computing in threads.

        Arguments, results and errors are as of `generate`; the event loop goes on meanwhile. When the task is
        cancelled, what a thread is computing (the prompt, or a token) is finished first.
        """
        tokens = self.generate(prompt, params, max_tokens=max_tokens, ignore_eos=ignore_eos, speculate=speculate)
        return in_threads(tokens)

    def begin_generation(self, drafter: Drafter | None) -> object:
        """Begin a generation, the only one until its `end_generation`.

        Raises SessionBusyError if one has begun.
        """
        with self.lock:
            if self._generation is not None:
                raise SessionBusyError(_BUSY)
            self._generation = generation = object()
            self.draft = None if drafter is None else Draft(drafter, getattr(drafter, "max_tokens", MAX_DRAFT))
            self._take_hidden = hidden_taker(drafter or self._drafter)
        return generation

    def end_generation(self, generation: object) -> None:
        """End a generation, and drop cells evaluated ahead."""
        self._drop_ahead()
        if self._generation is generation:
            self._generation = self.text = self.draft = None
            self._take_hidden = hidden_taker(self._drafter)

    @locked
    def save(self, path: str | os.PathLike[str], **extra: Any) -> int:
        """Write the whole state to a file.

        Tokens, keys and values, logits, random generator. `extra` is JSON of the caller's, which `load` returns.
        Returns the file's size in bytes. An existing file is replaced atomically. Raises OSError.
        """
        expect_path(path, "path")
        return snapshot.write(path, {0: self.cache}, **self._state(extra))

    @locked
    def save_state(self, **extra: Any) -> bytes:
        """Bytes that `save` writes."""
        return snapshot.dump({0: self.cache}, **self._state(extra))

    @locked
    def state_size(self) -> int:
        """Size of `save_state` in bytes."""
        return snapshot.state_size({0: self.cache}, **self._state({}))

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore a saved state; logits and draws continue bit for bit.

        It must be of the same model. Returns the `extra` that was saved. Raises StateError, changing nothing, if the
        file is damaged, of another version, of another model, mode or cache type, or does not fit; OSError;
        OutOfMemoryError, and then this session is empty.
        """
        expect_path(path, "path")
        return self._restore(snapshot.read(path, self.cache.pool))

    def load_state(self, data: bytes) -> dict[str, Any]:
        """Restore the bytes of `save_state`, as `load` does."""
        return self._restore(snapshot.load(data, self.cache.pool))

    def _state(self, extra: dict[str, Any]) -> dict[str, Any]:
        self._drop_stale_cells()
        arrays = {} if self._logits is None else {"logits": self._logits}
        embeddings, contents = self._contents.save(self._tokens)
        arrays |= embeddings
        more = {"contents": contents} if contents else {}
        return {"arrays": arrays, "tokens": self._cell_keys(), "sampler": self._sampler.draws, "owner": extra, **more}

    @locked
    def _restore(self, state: snapshot.Snapshot) -> dict[str, Any]:
        n_vocab, logits = self.model.config.n_vocab, state.arrays.get("logits")
        tokens, sampler, owner = (state.extra.get(name) for name in ("tokens", "sampler", "owner"))
        held = state.sequences[0].tokens if state.sequences.keys() == {0} else None
        if not isinstance(tokens, list) or held != tokens[: len(held or ())] or not isinstance(owner, dict):
            raise StateError("not the saved state of a session")
        if not all(is_integer(token) and token < n_vocab for token in tokens):
            raise StateError(f"the saved state has tokens that are not from 0 to {n_vocab - 1}")
        tokens, n_prompt = tokens_of(tokens)
        contents = Contents.load(state.arrays, state.extra.get("contents", []), tokens)
        if len(tokens) > self.n_ctx or (logits is not None and logits.shape != (n_vocab,)):
            raise StateError(
                f"the {len(tokens)} tokens or the logits of the saved state do not fit into {self.n_ctx} tokens"
            )
        draws = SamplerState(0, self.model.tokenizer, self.model.find_sampler)
        try:
            draws.draws = sampler or {}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise StateError(f"the random generator of the saved state cannot be restored: {error}") from None
        draws.steer = self.steer
        state.check({0: self.cache})
        self._logits, self._tokens, self._ahead, self.n_reused = None, [], (), 0
        state.restore({0: self.cache})
        self._tokens, self._n_prompt, self._contents = list(map(int, tokens)), n_prompt, contents
        self._logits = None if logits is None else logits.copy()
        self._sampler = draws
        return owner

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked_seed(seed: int | None) -> int:
    """Check a seed; None and -1 are a random one."""
    if seed is None or (is_integer(seed) and seed == -1):
        return secrets.randbits(32)
    if not is_integer(seed) or seed < 0:
        raise InvalidRequestError(
            f"seed must be an integer of at least 0, or None or -1 for a random one, not {seed!r}"
        )
    return int(seed)
