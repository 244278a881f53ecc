"""`dsv4 inspect`: rows, codes and choices inside a saved request."""
