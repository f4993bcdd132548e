"""The optimisations: engine-free and chip-free, written once against the op table."""
