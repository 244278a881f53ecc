"""The named errors of the library. Plain bad arguments are `ValueError` or `TypeError`."""


class OutOfBlocksError(RuntimeError):
    """A call needs more blocks than it can have. Nothing was changed.

    Attributes:
        needed: Blocks that the call needs.
        free: Blocks that nobody owns.
        evictable: Blocks that only the prefix cache owns, which the call could have taken too.
    """

    def __init__(
        self,
        needed: int,
        free: int,
        evictable: int | None = None,
        *,
        total: int,
        kind: str = "blocks",
        note: str = "",
    ) -> None:
        self.needed, self.free, self.evictable = needed, free, evictable or 0
        cached = "" if evictable is None else f" and {evictable} of the prefix cache"
        super().__init__(f"Out of {kind}: {needed} needed, {free} of {total} free{cached}{note}")


class NoFreeSlotError(RuntimeError):
    """More request slots are needed than are free. Nothing was changed.

    Attributes:
        needed: Slots that the call needs.
        free: Slots that are not open.
    """

    def __init__(self, needed: int, free: int, *, total: int, is_host: bool = False) -> None:
        self.needed, self.free = needed, free
        where = " on the host" if is_host else ""
        advice = "swap a request in, or drop one" if is_host else "free a request, or swap one out"
        super().__init__(f"No free slot{where}: {needed} needed, {free} of {total} free; {advice}")


class LiveForwardError(RuntimeError):
    """A forward is neither complete nor cancelled, and the call would get in its way."""


class LostCacheError(RuntimeError):
    """The device failed inside a call; nothing that the manager holds can be trusted."""


class RankLostError(RuntimeError):
    """A rank of a split context is gone, or too late, and its blocks with it.

    The forward is cancelled, unless all layers were written. No request can be run on. They can be
    freed, and the other ranks go on in a process group of their own.
    """


class IntegrityError(RuntimeError):
    """The books of a manager contradict each other."""


class HandoverError(RuntimeError):
    """A request was not handed over. The sender still has it, and the receiver does not."""


class HandoverRefusedError(HandoverError):
    """The receiver refused a request: its bytes mean something else, or there is no room."""


class PeerLostError(HandoverError):
    """The other process is gone, or too late. What it was sent or sends is dropped."""


class HandoverInDoubtError(PeerLostError):
    """The peer was lost after it was told to commit: it may have the request.

    The sender still has it. Offer it again by the same id before it runs on, unless the peer is
    known to be dead.
    """
