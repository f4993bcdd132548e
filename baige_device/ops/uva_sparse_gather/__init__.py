"""Scattered rows, host to device."""
