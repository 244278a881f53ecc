"""`dsv4 plan`: memory of a cache before it is allocated."""
