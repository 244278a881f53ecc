"""Bytes of the cache: schemas, layouts, capacity, pools, and who owns which part."""
