"""`RecordExchange`: records of a prefix store from the store of another process.

asks: addresses, bytes of a row, whether it is   →
the last time
                                                  ←   found, tokens of each
                                                  ←   their rows, and the xxh3 of the pieces
puts them into its own store; asks again
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.prefix.store import PrefixStore, RecordName
from dsv4.config import MAX_POSITION
from dsv4.distributed.channel import Channel, Region, RegionRows, Steps, load_xxh3
from dsv4.distributed.transport import DEADLINE_SECONDS, Transport
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
        self,
        store: PrefixStore,
        fingerprint: str,
        transport: Transport,
        *,
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        self._store, self._records = store, store.bind(fingerprint)
        self._channel, self._check = Channel(transport, deadline), load_xxh3()

    def fetch(self, records: Sequence[RecordName]) -> int:
        """Ask for the records that this store lacks; return how many have come.

        The peer calls `serve`. 32 are asked for at a time, and are put into the store together.

        Args:
            records: Their names; `KVCacheManager.name_records` has those of a prompt.

        Raises:
            PeerLostError: The peer is lost, or its bytes are wrong. What came with earlier asks is
                kept.
        """
        for num_bytes in {each.num_bytes for each in records}:
            self._channel.rows_per_piece(num_bytes)  # refuse too small a memory
        asks = list(self._asks(records)) or [[]]  # the peer waits for one
        return sum(_run(self._fetch(ask, is_last=ask is asks[-1])) for ask in asks)

    def serve(self) -> None:
        """Answer all that one `fetch` of the peer asks; waits for it.

        Raises:
            PeerLostError: The peer is lost, or what it sends is no question.
        """
        is_over = _run(self._serve(has_deadline=False))
        while not is_over:
            is_over = _run(self._serve(has_deadline=True))

    def _asks(self, records: Sequence[RecordName]) -> Iterator[list[RecordName]]:
        """Yield records that are not here, as many as are asked for at once, of equal bytes."""
        missing: dict[int, list[RecordName]] = {}
        for kind in dict.fromkeys(each.kind for each in records):
            of_kind = [each for each in records if each.kind == kind]
            known = self._records.contains(kind, [each.chain_hash for each in of_kind])
            for each, is_known in zip(of_kind, known, strict=True):
                if not is_known:
                    missing.setdefault(each.num_bytes, []).append(each)
        for same in missing.values():
            for start in range(0, len(same), ASKED_AT_ONCE):
                yield same[start : start + ASKED_AT_ONCE]

    def _fetch(self, asked: Sequence[RecordName], *, is_last: bool) -> Steps:
        channel, row_bytes = self._channel, asked[0].num_bytes if asked else 0
        names = [self._records.addresses(each.kind, [each.chain_hash])[0].hex() for each in asked]
        yield from channel.put("ask", addresses=names, row_bytes=row_bytes, is_last=is_last)
        tokens = (yield from channel.get("found"))["tokens"]
        if len(tokens) != len(asked) or not all(-1 <= n <= MAX_POSITION for n in tokens):
            raise PeerLostError(f"The peer sent tokens that are not expected: {tokens}")
        found = [(each, n) for each, n in zip(asked, tokens, strict=True) if n >= 0]
        if not found:
            return 0
        rows = torch.empty(len(found), row_bytes, dtype=torch.uint8)
        message = yield from channel.get("region")
        if message["region"] != [*_region(rows)]:
            raise PeerLostError(f"The peer sent a region that is not expected: {message['region']}")
        into = RegionRows(lambda first, count, data: rows[first : first + count].copy_(data))
        yield from channel.receive_region(_region(rows), into, self._check)
        if not (yield from channel.receive_checks()):
            raise PeerLostError("The peer sent records that have another xxh3")
        for (each, num_tokens), row in zip(found, rows, strict=True):
            self._records.put(each.kind, each.chain_hash, row, num_tokens)
        return len(found)

    def _serve(self, *, has_deadline: bool) -> Steps:
        """Answer once; return whether that was the last time."""
        channel = self._channel
        ask = yield from channel.get("ask", has_deadline=has_deadline)
        names, row_bytes = ask["addresses"], ask["row_bytes"]
        is_right = len(names) <= ASKED_AT_ONCE and 0 <= row_bytes <= channel.piece_bytes
        if not is_right or not all(re.fullmatch("[0-9a-f]{64}", each) for each in names):
            raise PeerLostError("The peer asks for what can be no records")
        rows = torch.empty(len(names), row_bytes, dtype=torch.uint8)
        read = self._store.read([bytes.fromhex(each) for each in names], rows)
        tokens = read.num_tokens  # waits; -1 where none was found
        yield from channel.put("found", tokens=tokens)
        rows = rows[[idx for idx, count in enumerate(tokens) if count >= 0]]
        if len(rows):
            source = RegionRows(lambda first, count, into: into.copy_(rows[first : first + count]))
            yield from channel.send_region(_region(rows), source, self._check)
            yield from channel.send_checks()
        return ask["is_last"]


def _region(rows: Tensor) -> Region:
    return Region("records", 0, *rows.shape)


def _run(steps: Steps) -> Any:
    """Take all steps, and wait where they do; return their result."""
    try:
        while True:
            pending = next(steps)
            if pending is not None:
                pending.wait(WAIT_SECONDS)
    except StopIteration as end:
        return end.value
