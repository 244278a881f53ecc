"""`dsv4 demo`: generation through this cache and through transformers' own."""
