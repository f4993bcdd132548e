"""Thin mounts into the host engines: translate and patch through a ledger; no algorithm lives here."""
