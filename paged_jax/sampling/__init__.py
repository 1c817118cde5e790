"""Choosing tokens, and knowing when to stop."""
