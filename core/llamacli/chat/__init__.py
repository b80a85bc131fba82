"""Chats: templates, reply syntax, and conversations over a session."""
