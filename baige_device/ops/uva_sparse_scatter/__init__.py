"""Scattered rows, device to host."""
