"""The chips: one folder each, one file an op, vendor modules imported only when an op is chosen."""
