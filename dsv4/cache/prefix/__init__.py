"""The prefix cache: which blocks hold which tokens, and where requests can be resumed."""
