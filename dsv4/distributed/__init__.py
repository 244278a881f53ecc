"""Requests between processes: transports that others wrote, and the hand-over above them."""
