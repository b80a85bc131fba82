"""Blocks of layers that several model families share, for their plugins.

- `classifier`: classifier heads of rerankers.
- `decoder`: decoders whose differences are attributes and methods.
- `mixture`: feed-forward networks, routed and shared experts.
- `state_space`: layers with a state space recurrence (SSM).
- `vision`: vision transformers of media encoders.
"""
