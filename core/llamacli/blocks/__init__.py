"""Blocks of layers that several model families share, for their plugins.

- `state_space`: layers with a state space recurrence (SSM).
"""
