"""`Channel`: what two sides of a hand-over say to each other, and how regions travel.

The memory of a transport is two short messages, one a direction, and pieces of data. While some
pieces travel, another is filled or read.

    | out 4 KiB | in 4 KiB | piece 0 | piece 1 | piece 2 | piece 3 |

A region is rows of equal bytes: blocks in a request's order, a slot, token ids or records. It is
one message that names it, then its rows in as few pieces as fit. Each side has a piece in place
where its rows lie one after the other, and copies it otherwise. The xxh3-64 of all pieces come
last.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.memory.device_rows import as_buffer
from dsv4.distributed.transport import Pending, Transport
from dsv4.errors import HandoverError, PeerLostError

MESSAGE_BYTES = 4096
CHECKS_PER_MESSAGE = 200
NUM_PIECES = 4
MOST_IN_PLACE = 16  # pieces on their way: a sender that polls goes back to its work
LARGEST = 2**63 - 1
# The fields of each message, by kind. [type]: a list of such; (type, ..): a list of exactly these.
MESSAGES: dict[str, dict[str, Any]] = {
    "offer": {"id": str, "nonce": int, "fingerprint": str, "num_tokens": int, "piece_bytes": int,
              "has_checks": bool},
    "accept": {}, "refuse": {"why": str}, "have": {"length": int},
    "region": {"region": (str, int, int, int)}, "alive": {}, "checked": {},
    "checks": {"checks": [str]},
    "end": {"length": str, "rollback_floor": str, "prefix_root": str},
    "ready": {}, "commit": {}, "done": {},
    "ask": {"addresses": [str], "row_bytes": int, "is_last": bool}, "found": {"tokens": [int]},
}  # fmt: skip
Steps = Generator[Pending | None, None, Any]
RegionKind = Literal["blocks", "slot", "token_ids", "records"]


class Region(NamedTuple):
    """Rows of a request: `num_rows` of them from `first` on, of `row_bytes` each."""

    kind: RegionKind
    first: int
    num_rows: int
    row_bytes: int


class RegionRows(NamedTuple):
    """The rows of a region on one side.

    Attributes:
        copy: Copies `count` rows from `first` on to a piece, or from it, `[count, row_bytes]`.
        find: Returns such rows in place, in memory that the transport knows, or None.
    """

    copy: Callable[[int, int, Tensor], object]
    find: Callable[[int, int], Tensor | None] = lambda first, count: None


def load_xxh3() -> Callable[[Any], bytes]:
    try:
        from xxhash import xxh3_64_digest
    except ImportError as error:
        raise ImportError("Checked hand-overs need xxhash: pip install 'dsv4[store]'") from error
    return xxh3_64_digest


def _read_message(data: bytes, expected: tuple[str, ...]) -> dict[str, Any]:
    try:
        message = json.loads(data)
        kind = message["kind"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise PeerLostError("The peer sent what is no message") from None
    if kind not in expected:
        raise PeerLostError(f"The peer sent {kind!r}: expected {' or '.join(expected)}")
    for name, type_of in MESSAGES[kind].items():
        if not _has_type(message.get(name), type_of):
            raise PeerLostError(f"The peer sent {kind!r} with {name} that is not expected")
    return dict(message)


def _has_type(value: Any, expected: Any) -> bool:
    """Whether a field has a type of `MESSAGES`; numbers are those of 64 bits."""
    if isinstance(expected, list):
        return type(value) is list and all(_has_type(each, expected[0]) for each in value)
    if isinstance(expected, tuple):
        is_whole = type(value) is list and len(value) == len(expected)
        return is_whole and all(map(_has_type, value, expected))
    return type(value) is expected and (expected is not int or abs(value) <= LARGEST)


def _hash(data: Tensor, check: Callable[[Any], bytes]) -> str:
    on_host = data.cpu()
    return check(as_buffer(on_host)).hex()


class Channel:
    """One side of a connection. Each call is a generator that yields what it waits for.

    Args:
        transport: The connection.
        deadline: Seconds after which a peer that says nothing is lost.
    """

    def __init__(self, transport: Transport, deadline: float) -> None:
        self.transport, self.deadline = transport, deadline
        self._out, self._in, rest = transport.memory.split(
            [MESSAGE_BYTES, MESSAGE_BYTES, len(transport.memory) - 2 * MESSAGE_BYTES]
        )
        self.piece_bytes = len(rest) // NUM_PIECES
        self._pieces = rest.split(self.piece_bytes)[:NUM_PIECES]
        self._sent: list[Pending | None] = [None] * NUM_PIECES
        self._next = 0
        self._in_place: deque[Pending] = deque()
        self._checks: list[str] = []  # of the pieces so far

    def put(self, kind: str, **fields: Any) -> Steps:
        data = json.dumps({"kind": kind, **fields}).encode().ljust(MESSAGE_BYTES)
        if len(data) > MESSAGE_BYTES:
            raise HandoverError(f"A message is too long: expected {MESSAGE_BYTES} bytes at most")
        self._out.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        yield from self._until(self.transport.send(self._out))

    def get(self, *expected: str, has_deadline: bool = True) -> Steps:
        """Receive a message of one of these kinds, as a dict with the fields of `MESSAGES`."""
        yield from self._until(self.transport.receive(self._in), has_deadline=has_deadline)
        return _read_message(bytes(self._in.cpu().numpy()), expected)

    def rows_per_piece(self, row_bytes: int) -> int:
        """Rows that a piece holds; refuses rows longer than a piece."""
        if row_bytes > self.piece_bytes:
            raise ValueError(
                f"Invalid memory of a transport: expected {NUM_PIECES} pieces of at least "
                f"{row_bytes} bytes, got {self.piece_bytes}"
            )
        return self.piece_bytes // max(1, row_bytes)

    def send_region(
        self, region: Region, rows: RegionRows, check: Callable[[Any], bytes] | None
    ) -> Steps:
        """Start to send rows; each piece is hashed while it travels."""
        per_piece = self.rows_per_piece(region.row_bytes)
        yield from self.put("region", region=region)
        end = region.first + region.num_rows
        for first in range(region.first, end, per_piece):
            count = min(per_piece, end - first)
            data = rows.find(first, count)
            if data is not None:
                if len(self._in_place) == MOST_IN_PLACE:
                    yield from self._until(self._in_place.popleft())
                self._in_place.append(self.transport.send(data.view(-1)))
            else:
                yield from self._until(self._sent[self._next])
                data = self._piece(self._next, count, region)
                rows.copy(first, count, data)
                self._sent[self._next] = self.transport.send(data.view(-1))
                self._next = (self._next + 1) % NUM_PIECES
            if check is not None:
                self._checks.append(_hash(data, check))

    def send_checks(self) -> Steps:
        """Send the hashes of all pieces since the last time."""
        checks, self._checks = self._checks, []
        for start in range(0, len(checks), CHECKS_PER_MESSAGE):
            yield from self.put("checks", checks=checks[start : start + CHECKS_PER_MESSAGE])

    def receive_region(
        self, region: Region, rows: RegionRows, check: Callable[[Any], bytes] | None
    ) -> Steps:
        """Receive rows."""
        per_piece = self.rows_per_piece(region.row_bytes)
        end = region.first + region.num_rows
        starts = range(region.first, end, per_piece)
        counts = [min(per_piece, end - first) for first in starts]
        coming: list[tuple[Tensor, bool, Pending]] = []
        num_staged = num_copied = 0
        for i, (first, count) in enumerate(zip(starts, counts, strict=True)):
            while len(coming) < len(counts) and num_staged < num_copied + NUM_PIECES:
                place = starts[len(coming)], counts[len(coming)]
                data, is_staged = rows.find(*place), False
                if data is None:
                    data, is_staged = self._piece(num_staged % NUM_PIECES, place[1], region), True
                    num_staged += 1
                coming.append((data, is_staged, self.transport.receive(data.view(-1))))
            data, is_staged, pending = coming[i]
            yield from self._until(pending)
            if check is not None:
                self._checks.append(_hash(data, check))
            if is_staged:
                rows.copy(first, count, data)
                num_copied += 1

    def receive_checks(self) -> Steps:
        """Receive the hashes of all pieces; return whether they are as here."""
        checks, self._checks = self._checks, []
        expected: list[str] = []
        while len(expected) < len(checks):
            message = yield from self.get("checks")
            expected += message["checks"] or [""]  # a peer that sends none is wrong
        return checks == expected

    def _piece(self, idx: int, count: int, region: Region) -> Tensor:
        """Cut a piece to `[count, row_bytes]`."""
        data: Tensor = self._pieces[idx][: count * region.row_bytes]
        return data.view(count, region.row_bytes)

    def _until(self, pending: Pending | None, *, has_deadline: bool = True) -> Steps:
        end = time.monotonic() + self.deadline
        while pending is not None and not pending.wait(0):
            if has_deadline and time.monotonic() > end:
                raise PeerLostError(f"The peer is late: it said nothing for {self.deadline} s")
            yield pending
