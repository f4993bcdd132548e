"""Hot-cache lookup, eviction and miss plan."""
