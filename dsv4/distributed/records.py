"""`RecordExchange`: records of a prefix store from the store of another process.

asks: addresses, and bytes of a row              →
                                                  ←   found, tokens of each
                                                  ←   their rows, and the xxh3 of the pieces
puts them into its own store
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.prefix.store import PrefixStore
from dsv4.distributed.channel import Channel, Region, RegionRows, Steps, load_xxh3
from dsv4.distributed.transport import Transport
from dsv4.errors import PeerLostError

ASKED_AT_ONCE = 32  # of a message
WAIT_SECONDS = 0.02


class RecordExchange:
    """One side of a connection between two stores; one side asks at a time.

    Args:
        store: This side's store. Records of another model or key are not found.
        fingerprint: `CacheConfig.format_fingerprint` of the records.
        transport: A connection that nobody else uses.
        deadline: Seconds after which a peer that says nothing is lost.
    """

    def __init__(
        self, store: PrefixStore, fingerprint: str, transport: Transport, *, deadline: float = 30.0
    ) -> None:
        self._store, self._records = store, store.bind(fingerprint)
        self._channel, self._check = Channel(transport, deadline), load_xxh3()

    def fetch(self, kind: str, hashes: Sequence[bytes], row_bytes: int) -> int:
        """Ask for the records that this store lacks; return how many have come.

        Args:
            kind, hashes: The records, as `BoundStore.put` is given them.
            row_bytes: Bytes of each.

        Raises:
            PeerLostError: The peer is lost, or its bytes are wrong. None of them is kept.
        """
        known = self._records.contains(kind, hashes)
        missing = [each for each, is_known in zip(hashes, known, strict=True) if not is_known]
        return sum(
            _run(self._fetch(kind, missing[start : start + ASKED_AT_ONCE], row_bytes))
            for start in range(0, len(missing), ASKED_AT_ONCE)
        )

    def serve(self) -> None:
        """Answer what the peer asks, once; waits for it."""
        _run(self._serve())

    def _fetch(self, kind: str, hashes: Sequence[bytes], row_bytes: int) -> Steps:
        channel = self._channel
        names = [each.hex() for each in self._records.addresses(kind, hashes)]
        yield from channel.put("ask", addresses=names, row_bytes=row_bytes)
        answer = yield from channel.get("found")
        tokens = _checked(answer, "tokens", [-1] * len(hashes))
        found = [(each, n) for each, n in zip(hashes, tokens, strict=True) if n >= 0]
        if not found:
            return 0
        rows = torch.empty(len(found), row_bytes, dtype=torch.uint8)
        region = yield from channel.get("region")
        if region["region"] != [*_region(rows)]:
            raise PeerLostError(f"The peer sent a region that is not expected: {region['region']}")
        into = RegionRows(lambda first, count, data: rows[first : first + count].copy_(data))
        yield from channel.receive_region(_region(rows), into, self._check)
        if not (yield from channel.receive_checks()):
            raise PeerLostError("The peer sent records that have another xxh3")
        for (each, num_tokens), row in zip(found, rows, strict=True):
            self._records.put(kind, each, row, num_tokens)
        return len(found)

    def _serve(self) -> Steps:
        channel = self._channel
        ask = yield from channel.get("ask", has_deadline=False)
        names, row_bytes = _checked(ask, "addresses", [""]), _checked(ask, "row_bytes", 0)
        channel.rows_per_piece(row_bytes)
        addresses = [bytes.fromhex(each) for each in names[:ASKED_AT_ONCE]]
        rows = torch.empty(len(addresses), row_bytes, dtype=torch.uint8)
        read = self._store.read(addresses, rows)
        read.wait()
        each = zip(read.num_tokens, read.found, strict=True)
        tokens = [count if is_found else -1 for count, is_found in each]
        yield from channel.put("found", tokens=tokens)
        rows = rows[[idx for idx, count in enumerate(tokens) if count >= 0]]
        if len(rows):
            source = RegionRows(lambda first, count, into: into.copy_(rows[first : first + count]))
            yield from channel.send_region(_region(rows), source, self._check)
            yield from channel.send_checks()


def _region(rows: Tensor) -> Region:
    return Region("records", 0, *rows.shape)


def _checked(message: dict[str, Any], name: str, like: Any) -> Any:
    """Return a field that has the type of `like`, and of its items and their number."""
    value: Any = message.get(name)
    is_right = type(value) is type(like)
    if is_right and isinstance(like, list):
        is_right = all(type(each) is type(like[0]) for each in value)
        is_right &= name != "tokens" or len(value) == len(like)
    if not is_right:
        raise PeerLostError(f"The peer sent {name} that are not expected")
    return value


def _run(steps: Steps) -> Any:
    """Take all steps, and wait where they do; return their result."""
    try:
        while True:
            pending = next(steps)
            if pending is not None:
                pending.wait(WAIT_SECONDS)
    except StopIteration as end:
        return end.value
