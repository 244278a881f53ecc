"""`dsv4 plan`: the memory of a cache, before it is allocated."""
