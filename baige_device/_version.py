"""The version, apart from the package's other names so that every layer may read it."""

__version__ = "0.1.0"
