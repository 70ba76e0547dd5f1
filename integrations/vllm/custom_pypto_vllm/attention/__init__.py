"""Attention over what an indexer selects, as layers, caches and a backend of vLLM."""
