"""`dsv4 bench`: a module for each bench, and what they share."""
