"""Weight shards of all ranks, gathered."""
