"""A whole attention layer on top of the cache, and a random model for tests."""
