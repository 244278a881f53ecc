"""The cache: pools, plans, handles, the manager and the life of requests."""
