"""Blocks of layers that several model families share, for their plugins.

- `decoder`: decoders whose differences are attributes and methods.
- `mixture`: feed-forward networks, routed and shared experts.
- `state_space`: layers with a state space recurrence (SSM).
"""
