"""Generation of text by sessions, batches, chats, branches and the server.

- `stream`: `TokenSequence`, of which each step of any caller draws, takes and advances; `TokenStream`, a sequence with
  a context to rewind, fork and share. Chunks of sequences are evaluated by `llamacli.engine.batching`.
- `text`: text of drawn tokens, with stop strings.
- `drafts`: controller of speculative decoding; `drafting`, `drafters`, `mtp`: its interface and drafters. `costs`: the
  time of steps, by rows.
- `loop`: what generates text with one session, or with several.
"""
