"""`propose_drafts`: guess the next tokens from the text so far (prompt lookup)."""

SIZES = (3, 2)  # of the tails that are looked up, in this order
FARTHEST = 4096  # tokens that are searched backwards

Ends = dict[tuple[int, ...], int]


def propose_drafts(ids: list[int], count: int, ends: Ends) -> list[int]:
    """Return up to `count` tokens that followed the last ones where they stood before.

    Args:
        ids: The text, which has only grown since the last call.
        ends: Where tails of the text end last, which is noted here; {} for a new text. The empty
            tail ends at the last token that was noted.
    """
    first = max(0, len(ids) - FARTHEST)
    if len(ends) > 4 * FARTHEST:
        ends.clear()
    for end in range(max(ends.get((), -1) + 1, first), len(ids) - 1):
        for size in (*SIZES, 0):
            ends[tuple(ids[max(end + 1 - size, 0) : end + 1])] = end
    for size in SIZES:
        end = ends.get(tuple(ids[-size:]), -1)
        if end >= first + size - 1:
            return ids[end + 1 : end + 1 + count]
    return []
