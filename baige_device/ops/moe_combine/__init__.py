"""Expert outputs back to their tokens."""
