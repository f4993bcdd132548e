"""New rows into a paged cache."""
