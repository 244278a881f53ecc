"""Layers on top of the cache, and a random model to test with."""
