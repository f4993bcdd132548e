"""The registry: hooks (what can be offered), discovery (who offers), resolution (one choice an op), the table."""
