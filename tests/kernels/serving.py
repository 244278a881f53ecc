"""A day of serving in small: every kind of forward that the launches of a manager depend on."""

import random

import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.testing import model_projections, model_weights, move_to, take_rows

LONGEST = 5000
BATCH = 256
CHUNKS = (*range(2, 300), 383, 384, 385, 511, 512, 513, 1000, 1024, 2047, 2048, 3333, 4096)
LAYERS: dict[str, dict] = {
    "v4_flash": {"compress_ratios": (0, 4, 128)},
    "v41_flash": {"compress_ratios": (0, 2, 2, 1, 1), "kv_source_layer_ids": (1, 3),
                  "index_source_layer_ids": (1, 3, 4), "candidate_source_layer_id": 3},
}  # fmt: skip


class Server:
    """A manager of one layer per type at a model's width, and what its forwards are given."""

    def __init__(
        self,
        *,
        drafts_per_step: int,
        max_requests: int = BATCH,
        index_num_heads: int = 1,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        model: str = "v4_flash",
    ) -> None:
        config = getattr(CacheConfig, model)(
            **LAYERS[model],
            num_query_heads=1,
            index_num_heads=index_num_heads,
            drafts_per_step=drafts_per_step,
        )
        self.manager = KVCacheManager(
            config, max_requests=max_requests, num_blocks=300, max_forward_tokens=4096,
            max_request_tokens=LONGEST + 8, num_checkpoints=4, device=device,
        )  # fmt: skip
        self.weights = [move_to(device, layer) for layer in model_weights(config, seed=0)]
        self.inputs = [
            move_to(device, layer) for layer in model_projections(config, 4096, seed=1, dtype=dtype)
        ]
        self.lengths: dict[int, int] = {}

    def open(self, length: int = 0) -> int:
        slot = self.manager.open_request()
        self.lengths[slot] = 0
        if length:
            self.forward({slot: length})
        return slot

    def close_all(self) -> None:
        for slot in self.lengths:
            self.manager.free_request(slot)
        self.lengths.clear()

    def forward(self, counts: dict[int, int], *, in_parts: bool = False, gathers: bool = False):
        """Some requests go on by some tokens each."""
        before = [self.lengths[slot] for slot in counts]
        after = [b + n for b, n in zip(before, counts.values(), strict=True)]
        plan, chosen = prepare_forward(self.manager, list(counts), before, after), {}
        for layer_idx, weights in enumerate(self.weights):
            handle = self.manager.acquire(layer_idx, plan)
            inputs = take_rows(self.inputs[layer_idx], slice(0, plan.num_tokens))
            if in_parts:
                write_in_parts(handle, inputs, weights)
            else:
                handle.write(inputs, weights)
            if gathers:
                gather(handle)
                attend(handle, inputs, weights.sinks, chosen)
        self.lengths.update(zip(counts, after, strict=True))
        return plan


def write_in_parts(handle, inputs, weights) -> None:
    handle.write_swa(inputs.kv, weights.kv_norm)
    if inputs.compressor is not None:
        index = inputs.indexer
        handle.flush_compression(
            *inputs.compressor,
            weights.compressor,
            index_kv=None if index is None else index.kv,
            index_gate=None if index is None else index.gate,
            index_weights=weights.indexer,
        )


def gather(handle) -> None:
    handle.gather_swa_kv()
    if handle.paged is not None:
        rows = torch.full((handle.plan.num_tokens, 512), -1, device=handle.positions.device)
        handle.gather_compressed_kv(rows)
        handle.gather_all_compressed_kv()


def attend(handle, inputs, sinks, chosen=None, *, is_query_raw: bool = False) -> None:
    """Select and attend; `chosen` has the selections of this forward, if layers share them."""
    layer, chosen = handle.layer, {} if chosen is None else chosen
    if inputs.indexer is not None:
        query, head_weights = inputs.indexer.query, inputs.indexer.head_weights
        candidates = chosen.get(layer.candidates_of)
        chosen[layer.layer_idx] = handle.select_entries(query, head_weights, candidates)
    for given in (sinks, None):
        handle.attend(inputs.query, given, chosen.get(layer.choice_of), is_query_raw=is_query_raw)


def serve(server: Server, *, longest: int = LONGEST) -> None:
    """Decode through every length; chunks of many sizes; steps; batches of many sizes."""
    decode_through_all_lengths(server, longest)
    prefill_in_chunks(server, longest)
    for mix in (
        decode_in_batches, verify_drafts, commit_steps, mix_everything, checkpoint_prompts
    ):  # fmt: skip
        mix(server)
        server.close_all()


def decode_through_all_lengths(server: Server, longest: int) -> None:
    slot = server.open()
    for length in range(longest):
        server.forward({slot: 1}, in_parts=length % 50 == 1, gathers=length % 50 == 2)
    server.close_all()


def prefill_in_chunks(server: Server, longest: int) -> None:
    for index, size in enumerate(CHUNKS):
        slot = server.open(1 if index % 3 else 0)
        is_small = size < 300
        while server.lengths[slot] + size <= min(longest, 2 * size + 1):
            server.forward(
                {slot: size}, in_parts=index % 5 == 1, gathers=is_small and index % 5 == 2
            )
        server.close_all()


def decode_in_batches(server: Server) -> None:
    slots = [server.open() for _ in range(server.manager.num_free_slots)]
    for batch in range(1, len(slots) + 1):
        server.forward(dict.fromkeys(slots[:batch], 1), in_parts=batch % 10 == 1)
        if batch % 10 == 0:  # rows without a token make a step of it
            server.forward({slot: row % 2 for row, slot in enumerate(slots[:batch])})


def checkpoint_prompts(server: Server) -> None:
    """Chunks with a checkpoint inside, of one prompt and beside a step."""
    block = server.manager.config.block_tokens
    for prompt, size in enumerate((block + 3, block + 9, 2 * block - 1, 5 * block - 1)):
        slot = server.manager.resume_request([prompt] * size).slot
        other = server.open()
        server.lengths[slot] = 0
        plan = server.forward({slot: size - 2, other: 1}, in_parts=prompt % 2 == 1)
        assert plan.boundaries is not None
        server.close_all()


def verify_drafts(server: Server) -> None:
    """Steps of several tokens, and, also without drafts, of none beside one."""
    choose, most = random.Random(0), server.manager.capacity.max_step_tokens
    slots = [server.open(prompt) for prompt in (0, 1, 3, 100, 127, 130)]
    for step in range(200):
        chosen = choose.sample(slots, choose.randint(1, len(slots)))
        counts = {slot: choose.randint(0, most) for slot in chosen}
        server.forward(counts, in_parts=step % 10 == 1, gathers=step % 10 == 2)


def commit_steps(server: Server) -> None:
    """Steps whose lengths only the device knows, in batches of many sizes."""
    manager, num_tokens = server.manager, server.manager.capacity.max_step_tokens
    slots = [server.open() for _ in range(server.manager.num_free_slots)]
    for batch in range(1, len(slots) + 1, 3):
        plan = manager.prepare_step(slots[:batch], num_tokens)
        plan.complete()
        plan.commit(torch.ones(batch, dtype=torch.int32, device=manager.device))


def mix_everything(server: Server) -> None:
    choose = random.Random(1)
    slots = [server.open() for _ in range(6)]
    for step in range(200):
        chosen = choose.sample(slots, choose.randint(1, len(slots)))
        counts = {slot: choose.choice((0, 1, 1, 2, 3, 4, 5, 7, 17)) for slot in chosen}
        server.forward(counts, in_parts=step % 10 == 1, gathers=step % 10 == 2)
