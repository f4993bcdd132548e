"""The DSA indexer's choice."""
