"""Conversations: a model's chat template, its replies taken apart, and the session that both go through."""
