"""Back from the wire format."""
