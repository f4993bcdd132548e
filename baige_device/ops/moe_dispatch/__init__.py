"""Tokens to their experts."""
