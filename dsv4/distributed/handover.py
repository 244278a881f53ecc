"""Hand-over of a request to a manager in another process: one of both has it, always.

    sender                                        receiver
    offer: id, nonce, fingerprint, most    →
    tokens
                                           ←      accept | refuse | have
    blocks, as soon as they are final      →      writes to room that nobody sees
    last block, slot, ids; end: length,    →
    floor, salt
                                           ←      ready | refuse
    commit                                 →      opens the request
                                           ←      done
    frees the request

Whatever fails before the commit leaves the receiver as before, and the sender with the request.
After it the sender is in doubt. It offers the request again by its id. A receiver that has it says
so, and any other takes it anew. A nonce tells the request from others that had its id.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.incoming import IncomingRequest
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.device_rows import copy_bytes
from dsv4.cache.saved_request import SavedRequest, check_request
from dsv4.distributed.channel import Channel, Region, RegionRows, Steps, load_xxh3
from dsv4.distributed.transport import DEADLINE_SECONDS, Transport
from dsv4.errors import (
    HandoverError,
    HandoverInDoubtError,
    HandoverRefusedError,
    LostCacheError,
    NoFreeSlotError,
    OutOfBlocksError,
    PeerLostError,
)

NUM_REMEMBERED = 4096
MAX_ID = 256  # characters
MAX_WHY = 600
WAIT_SECONDS = 0.02


class _Driver:
    """Takes the steps of one side; one thread at a time, the manager's."""

    def __init__(self, manager: KVCacheManager, transport: Transport, deadline: float) -> None:
        self._manager, self._transport = manager, transport
        self._channel = Channel(transport, deadline)
        self._channel.rows_per_piece(manager.blocks.num_bytes)  # refuse too small a memory
        pool, memory = manager.blocks.pieces[0].storage, transport.memory
        self._is_direct = not manager.blocks.is_split and pool.is_cpu and memory.is_cpu
        if self._is_direct:
            transport.add_memory(pool)
            manager.transfers.add(self)
        self._steps: Steps = self._run()
        self._failure: BaseException | None = None

    def _run(self) -> Steps:
        raise NotImplementedError

    def _advance(self, seconds: float = 0.0) -> bool:
        """Go on until the peer keeps it waiting for so long; return whether all is done."""
        try:
            while self._failure is None:
                pending = next(self._steps)
                if pending is None or not pending.wait(seconds):
                    return False
        except StopIteration:
            return True
        except BaseException as error:
            self._failure = error
        if not isinstance(self._failure, HandoverRefusedError):
            self.close()  # again, where an interrupt ended it
        raise self._failure

    def close(self) -> None:
        """Give up what is on its way, and end the connection."""
        self._transport.close()  # before the room of what it writes is given up
        self._steps.close()


class Handover(_Driver):
    """The sender's side of one hand-over.

    Call `poll` between the forwards of a prefill: final blocks leave meanwhile. Call `finish` once
    the request is as it should arrive, then `wait`. The request must not be truncated or run on
    after `finish`. It is freed when the receiver has it.

    Args:
        manager, slot: The request.
        transport: A connection that nobody else uses meanwhile.
        request_id: Names the request on both sides, at any time.
        num_tokens: The most tokens that it will have at `finish`.
        deadline: Seconds after which a peer that says nothing is lost.
        has_checks: Let the receiver check each piece by its xxh3.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        slot: int,
        transport: Transport,
        request_id: str,
        *,
        num_tokens: int,
        deadline: float = DEADLINE_SECONDS,
        has_checks: bool = True,
    ) -> None:
        if not 0 < len(request_id) <= MAX_ID:
            raise ValueError(
                f"Invalid request_id: expected 1 to {MAX_ID} characters, got {len(request_id)}"
            )
        self._slot, self._id, self._num_tokens = slot, request_id, num_tokens
        self._nonce = manager.request_nonce(slot)
        self._check = load_xxh3() if has_checks else None
        self._rest: SavedRequest | None = None
        self._is_in_doubt = self._is_done = False
        self._num_sent = 0
        super().__init__(manager, transport, deadline)

    def finish(self) -> None:
        """Say that the request is complete.

        Raises:
            ValueError: It has more tokens than `num_tokens`.
            LiveForwardError: A forward of it is neither complete nor cancelled.
        """
        rest = self._manager.export_request(self._slot, first_block=self._num_final())
        if rest.length > self._num_tokens:
            raise ValueError(
                f"Invalid request: expected at most num_tokens ({self._num_tokens}) tokens, "
                f"got {rest.length}"
            )
        self._rest = rest

    def poll(self, seconds: float = 0.0) -> bool:
        """Send what can be sent; return whether the receiver has the request.

        Args:
            seconds: How long it may wait for the peer.

        Raises:
            HandoverError: It was refused, or the peer is lost. The request is as it was. After a
                refusal the connection can be used again.
            HandoverInDoubtError: The peer may have it all the same.
        """
        if not self._is_done:
            try:
                self._is_done = self._advance(seconds)
            except HandoverError as error:
                if self._is_in_doubt:
                    raise HandoverInDoubtError(f"{error}; it may have the request") from error
                raise
        return self._is_done

    def wait(self) -> None:
        """Poll until the receiver has the request; `finish` comes first."""
        if self._rest is None:
            raise RuntimeError("Cannot wait for a hand-over: call finish() first")
        while not self.poll(WAIT_SECONDS):
            pass

    def _num_final(self) -> int:
        """Count the blocks that no forward changes any more."""
        num_blocks = len(self._blocks())
        if self._rest is not None:
            return num_blocks - len(self._rest.blocks)
        final = min(self._num_tokens, self._manager.final_tokens(self._slot))
        return min(final // self._manager.config.block_tokens, num_blocks)

    def _run(self) -> Steps:
        channel, config = self._channel, self._manager.config
        yield from channel.put(
            "offer", id=self._id, nonce=self._nonce, fingerprint=config.format_fingerprint,
            num_tokens=self._num_tokens, piece_bytes=channel.piece_bytes,
            has_checks=self._check is not None,
        )  # fmt: skip
        answer = yield from channel.get("accept", "refuse", "have")
        if answer["kind"] == "accept":
            yield from self._send_blocks()
            assert self._rest is not None
            yield from self._send_rest(self._rest)
            if self._check is not None:
                yield from channel.put("checked")
                yield from channel.send_checks()
            yield from channel.put("end", **self._rest.description)
            answer = yield from channel.get("ready", "refuse")
        if answer["kind"] == "refuse":
            raise HandoverRefusedError(
                f"The receiver refused request {self._id!r}: {answer['why']}"
            )
        self._check_unchanged()
        if answer["kind"] == "ready":
            self._is_in_doubt = True
            yield from channel.put("commit")
            yield from channel.get("done")
        elif answer["length"] != (length := int(self._manager.lengths[self._slot])):
            raise HandoverRefusedError(
                f"The receiver has request {self._id!r} with {answer['length']} tokens, and it has "
                f"{length} here"
            )
        if self._is_same():
            self._manager.free_request(self._slot)

    def _send_blocks(self) -> Steps:
        """Send final blocks until the request is complete, and a sign of life meanwhile."""
        said = time.monotonic()
        while True:
            count = self._num_final() - self._num_sent
            if count > 0:
                row_bytes = self._manager.blocks.num_bytes
                region = Region("blocks", self._num_sent, count, row_bytes)
                rows = RegionRows(self._read_blocks, self._find_blocks)
                yield from self._channel.send_region(region, rows, self._check)
                self._num_sent += count
            elif self._rest is not None:
                return
            elif time.monotonic() > said + self._channel.deadline / 4:
                yield from self._channel.put("alive")
            else:
                yield None
                continue
            said = time.monotonic()

    def _send_rest(self, rest: SavedRequest) -> Steps:
        """Send the blocks that could still change, the slot and the known ids."""
        ids = rest.token_ids.reshape(-1, 1).contiguous().view(torch.uint8)  # of none too
        for kind, first, rows in (
            ("blocks", self._num_sent, rest.blocks),
            ("slot", 0, rest.slot.view(-1, self._manager.config.page_align)),
            ("token_ids", 0, ids),
        ):  # fmt: skip
            if len(rows):
                region = Region(kind, first, *rows.shape)  # type: ignore[arg-type]
                reader = _tensor_rows(rows, first, in_place=self._transport.takes_any)
                yield from self._channel.send_region(region, reader, self._check)

    def _read_blocks(self, first: int, count: int, into: Tensor) -> None:
        self._manager.blocks.read(self._blocks()[first : first + count], into)

    def _find_blocks(self, first: int, count: int) -> Tensor | None:
        if not self._is_direct:
            return None
        return self._manager.blocks.view(self._blocks()[first : first + count])

    def _blocks(self) -> IntArray:
        """Return the blocks of the request, if it is the one that was offered."""
        self._check_unchanged()
        return self._manager.blocks_of(self._slot)

    def _is_same(self) -> bool:
        """Whether the slot has the request that was offered, with all that was sent."""
        is_open = bool(self._manager.is_open[self._slot])
        return is_open and self._manager.request_nonce(self._slot) == self._nonce

    def _check_unchanged(self) -> None:
        """Refuse a request that has lost tokens that were sent, or changed after `finish`."""
        length = -1 if self._rest is None else self._rest.length
        if not self._is_same() or length not in (-1, self._manager.lengths[self._slot]):
            raise HandoverError(
                f"Request {self._id!r} was freed or changed during its hand-over, which is given up"
            )


class Arrived(NamedTuple):
    """A request that was handed over, by its id, and the slot that it has here."""

    request_id: str
    slot: int


class Offered(NamedTuple):
    """One request of one sender: what it says of it whenever it offers it."""

    request_id: str
    nonce: int
    fingerprint: str


class Coming(NamedTuple):
    """A request that is on its way: its id, and the receiver that it comes by."""

    request_id: str
    receiver: "Receiver"


class Taken(NamedTuple):
    """A request that has arrived, once its room is accepted, and its tokens at that time."""

    incoming: IncomingRequest
    length: int


class Inbox:
    """The requests that one manager takes from other processes, whatever their connections.

    Attributes:
        taken: The last requests that were to arrive. An interrupt may leave one that did not.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.taken: dict[Offered, Taken] = {}

    def reserve(self, coming: Coming, num_tokens: int) -> IncomingRequest:
        """Keep room for a request; one with its id that is still on its way is given up.

        Raises:
            ValueError: Another request that came by this id is open, and did not go back to a
                checkpoint or to 0.
        """
        named = {
            taken.incoming.nonce
            for offered, taken in self.taken.items() if offered.request_id == coming.request_id
        }  # fmt: skip
        here = {each.nonce for each in self.manager.swapped_requests}
        if named and named & here.union(map(self.manager.request_nonce, self.manager.open_slots)):
            raise ValueError(f"another request has the id {coming.request_id!r} here")
        self.drop(request_id=coming.request_id)
        return self.manager.reserve_request(num_tokens, label=coming)

    def find(self, offered: Offered) -> Taken | None:
        """Return a request that has arrived; None if it did not."""
        taken = self.taken.get(offered)
        return taken if taken is not None and taken.incoming.is_accepted else None

    def accept(self, offered: Offered, incoming: IncomingRequest, saved: SavedRequest) -> None:
        """Open a request, which is remembered first: an interrupt leaves both or neither."""
        self.manager.check_incoming(incoming)  # else it may have arrived by another connection
        while len(self.taken) >= NUM_REMEMBERED:
            del self.taken[next(iter(self.taken))]
        self.taken[offered] = Taken(incoming, saved.length)
        self.manager.accept_request(incoming, saved)

    def drop(self, *, request_id: str | None = None, receiver: "Receiver | None" = None) -> None:
        """Give up what comes by an id or by a receiver; again does nothing more."""
        for each in self.manager.incoming_requests:
            label = each.label
            if isinstance(label, Coming) and (
                label.request_id == request_id or label.receiver is receiver
            ):
                self.manager.drop_incoming(each)


class Receiver(_Driver):
    """The receiver's side of a connection, for one request after the other.

    Args:
        inbox: Where requests arrive; connections of a manager share it.
        transport: A connection that nobody else uses.
        deadline: Seconds after which a peer that says nothing inside a hand-over is lost.
    """

    def __init__(
        self, inbox: Inbox, transport: Transport, *, deadline: float = DEADLINE_SECONDS
    ) -> None:
        self._inbox = inbox
        self._arriving: list[tuple[str, IncomingRequest]] = []
        super().__init__(inbox.manager, transport, deadline)

    def poll(self, seconds: float = 0.0) -> list[Arrived]:
        """Receive what has come; return the requests that have arrived.

        Args:
            seconds: How long it may wait for the peer.

        Raises:
            PeerLostError: The connection is over, and all that arrived was returned. A request
                that was on its way is dropped.

        An interrupt at its very end may keep arrivals from the caller: `Inbox.taken` has them.
        """
        lost = None
        try:
            if not self._arriving:  # else an interrupt came before they were returned
                self._advance(seconds)
        except PeerLostError as error:
            lost = error
        arrived = [Arrived(name, each.slot) for name, each in self._arriving if each.is_accepted]
        self._arriving = []
        if lost is not None and not arrived:
            raise lost
        return arrived

    def wait(self) -> list[Arrived]:
        """Poll until requests have arrived."""
        while not (arrived := self.poll(WAIT_SECONDS)):
            pass
        return arrived

    def close(self) -> None:
        super().close()
        with suppress(LostCacheError):
            self._inbox.drop(receiver=self)  # also where an interrupt kept its steps from it

    def _run(self) -> Steps:
        while True:
            offer = yield from self._channel.get("offer", has_deadline=False)
            yield from self._receive(offer)

    def _receive(self, offer: dict[str, Any]) -> Steps:
        channel, inbox = self._channel, self._inbox
        offered = Offered(offer["id"], offer["nonce"], offer["fingerprint"])
        if (taken := inbox.find(offered)) is not None:
            yield from channel.put("have", length=taken.length)
            return
        try:
            try:
                self._check_offer(offer)
                check = load_xxh3() if offer["has_checks"] else None
                incoming = inbox.reserve(Coming(offer["id"], self), offer["num_tokens"])
            except (ValueError, NoFreeSlotError, OutOfBlocksError, ImportError) as error:
                yield from channel.put("refuse", why=_reason(str(error)))
                return
            yield from channel.put("accept")
            saved = yield from self._receive_parts(incoming, check)
            if isinstance(saved, SavedRequest):
                yield from channel.put("ready")
                yield from channel.get("commit")
                self._arriving.append((offer["id"], incoming))
                inbox.accept(offered, incoming, saved)
                yield from channel.put("done")
            else:
                yield from channel.put("refuse", why=_reason(saved))
        except ValueError as error:  # its room was given up meanwhile
            raise PeerLostError(f"The hand-over is over: {error}") from error
        finally:
            inbox.drop(receiver=self)

    def _check_offer(self, offer: dict[str, Any]) -> None:
        fingerprint = self._manager.config.format_fingerprint
        for name, mine in (
            ("fingerprint", fingerprint), ("piece_bytes", self._channel.piece_bytes),
        ):  # fmt: skip
            if offer[name] != mine:
                raise ValueError(f"expected the {name} {mine}, got {offer[name]}")
        if not 0 < len(offer["id"]) <= MAX_ID:
            raise ValueError(f"expected an id of 1 to {MAX_ID} characters")

    def _receive_parts(
        self, incoming: IncomingRequest, check: Callable[[Any], bytes] | None
    ) -> Steps:
        """Receive all regions; return the request, or why it is none."""
        manager, is_right = self._manager, check is None
        slot_bytes, page_align = manager.slots.num_bytes, manager.config.page_align
        slot = torch.empty(slot_bytes // page_align, page_align, dtype=torch.uint8)
        ids = torch.zeros(0, 4, dtype=torch.uint8)
        block_bytes = manager.blocks.num_bytes
        num_rows = {"blocks": 0, "slot": 0, "token_ids": 0}
        limits = {  # most rows, and their bytes
            "blocks": (len(incoming.blocks), block_bytes), "slot": tuple(slot.shape),
            "token_ids": (manager.config.max_position, 4),
        }  # fmt: skip

        def write(first: int, count: int, rows: Tensor) -> None:
            if region.kind == "blocks":
                manager.write_incoming(incoming, first, rows)
            else:
                copy_bytes((slot if region.kind == "slot" else ids)[first : first + count], rows)

        def find(first: int, count: int) -> Tensor | None:
            manager.check_incoming(incoming)
            if not self._is_direct:
                return None
            if region.kind != "blocks":
                rows = slot if region.kind == "slot" else ids
                return rows[first : first + count] if self._transport.takes_any else None
            incoming.stop = self._transport.close
            return manager.blocks.view(incoming.blocks[first : first + count])

        while True:
            message = yield from self._channel.get("region", "alive", "checked", "end")
            if message["kind"] == "alive":
                continue
            if message["kind"] == "checked":
                is_right = yield from self._channel.receive_checks()
                continue
            if message["kind"] == "end":
                break
            region = Region(*message["region"])
            most, row_bytes = limits.get(region.kind, (0, 0))
            is_next = (region.first, region.row_bytes) == (num_rows.get(region.kind), row_bytes)
            if not is_next or not 0 < region.num_rows <= most - region.first:
                raise PeerLostError(f"The peer sent a region that is not expected: {region}")
            is_right = check is None  # until all pieces are checked
            if region.kind == "token_ids":
                ids = torch.cat((ids, torch.zeros(region.num_rows, 4, dtype=torch.uint8)))
            yield from self._channel.receive_region(region, RegionRows(write, find), check)
            incoming.stop = None
            num_rows[region.kind] += region.num_rows
        if not is_right:
            return "some pieces have another xxh3"
        if num_rows["slot"] < len(slot):
            return "expected a whole slot"
        return self._request(message, incoming, slot, ids, num_rows["blocks"])

    def _request(
        self,
        message: dict[str, str],
        incoming: IncomingRequest,
        slot: Tensor,
        ids: Tensor,
        num_blocks: int,
    ) -> SavedRequest | str:
        """Return the request if it is one, or why not."""
        manager, token_ids = self._manager, ids.reshape(-1).view(torch.int32)
        shape = num_blocks, manager.blocks.num_bytes
        blocks = torch.empty(shape, dtype=torch.uint8, device="meta")  # written already
        try:
            saved = SavedRequest(
                int(message["length"]), int(message["rollback_floor"]), slot.reshape(-1), blocks,
                message["prefix_root"], token_ids, manager.config.format_fingerprint,
            )  # fmt: skip
            check_request(saved, manager.config, manager.layout)
            incoming.check_fits(saved.length)
        except ValueError as error:
            return str(error)
        return saved


def _reason(text: str) -> str:
    """Cut a text, which may have the peer's own words in it, to what a message has room for."""
    return text.encode("ascii", "backslashreplace")[:MAX_WHY].decode()


def _tensor_rows(rows: Tensor, offset: int, *, in_place: bool) -> RegionRows:
    """Let a tensor be read as rows from `offset` on, in place if it is on the CPU."""

    def find(first: int, count: int) -> Tensor:
        return rows[first - offset : first - offset + count]

    def read(first: int, count: int, into: Tensor) -> None:
        copy_bytes(into, find(first, count))

    return RegionRows(read, find) if in_place and rows.is_cpu else RegionRows(read)
