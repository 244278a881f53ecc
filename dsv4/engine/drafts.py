"""`propose_drafts`: guess the next tokens from the text so far (prompt lookup)."""

LONGEST_MATCH, SHORTEST_MATCH = 3, 2
FARTHEST = 4096  # tokens that are searched backwards


def propose_drafts(ids: list[int], count: int) -> list[int]:
    """Return up to `count` tokens that followed the last ones where they stood before."""
    first = max(0, len(ids) - FARTHEST)
    for size in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        tail, last = ids[-size:], ids[-1]
        for end in range(len(ids) - 2, first + size - 2, -1):
            if ids[end] == last and ids[end - size + 1 : end + 1] == tail:
                return ids[end + 1 : end + 1 + count]
    return []
