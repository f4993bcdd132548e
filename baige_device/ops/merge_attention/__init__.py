"""Merging partial attention."""
