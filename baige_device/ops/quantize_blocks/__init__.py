"""Block quantisation of weights."""
