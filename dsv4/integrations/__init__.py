"""The cache inside other libraries."""
