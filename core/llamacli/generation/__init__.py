"""Generation of text by sessions, batches, chats, branches and the server.

- `evaluation`: chunks of sequences, evaluated in one batch.
- `stream`: evaluated tokens of one sequence, with their KV cache and logits.
- `drafting`, `drafters`, `mtp`: speculative decoding. `costs`: the time of steps, by rows.
- `text`: text of drawn tokens, with stop strings.
- `loop`: steps that draw tokens, and what generates text with them.
"""
