"""Dense attention over a paged cache."""
