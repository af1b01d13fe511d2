"""Pointsman: decide, for every request to an LLM serving cluster, which replica runs it."""

__version__ = "0.1.0"
