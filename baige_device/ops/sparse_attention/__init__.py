"""Attention over lists of rows."""
