"""The named errors of the library. Plain bad arguments are `ValueError` or `TypeError`."""


class OutOfBlocksError(RuntimeError):
    """A forward needs more blocks than are free. Nothing was changed."""


class NoFreeSlotError(RuntimeError):
    """No request slot is free. Nothing was changed."""


class TornForwardError(RuntimeError):
    """A request's last forward did not write every layer; its slot can only be freed or emptied."""


class IntegrityError(RuntimeError):
    """The books of a manager contradict each other."""
