"""Numbers of docs/scale.md that follow from a config, on the page as they are computed here."""

from bisect import bisect_left
from pathlib import Path

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager
from dsv4.cache.memory.layout import cache_layout
from dsv4.cache.memory.schema import build_schemas
from dsv4.layer_schedule import AttentionType
from dsv4.testing import Row, model_projections, model_weights, run_forward
from dsv4.tools.planner.memory_plan import MemoryPlan
from tests.distributed import ranks
from tests.distributed.local import Group

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "scale.md").read_text().split())
LONGEST = 1 << 20
NVLINK, FAST, SLOW = 450e9, 50e9, 12.5e9  # bytes a second
MEMORY = 4.27e12
EXCHANGE = 10e-6  # seconds
GPU_BYTES = 141 * 10**9
CONFIGS = {
    "V4-Flash": CacheConfig.v4_flash(), "V4-Pro": CacheConfig.v4_pro(),
    "V4.1-Flash": CacheConfig.v41_flash(),
}  # fmt: skip
HIDDEN = {"V4-Flash": 4096, "V4-Pro": 7168, "V4.1-Flash": 5120}
STREAMS = 4  # hc_mult


def request_bytes(config, tokens, num_ranks=1):
    share = config.split_context(0, num_ranks)
    return MemoryPlan(share, 1, tokens, gpu_bytes=10**12).one_request().allocated


def layout_of(config):
    return cache_layout(config, build_schemas(config))


def rest_bytes(config):
    """What is left after the prefill: the last block and the fixed state."""
    layout = layout_of(config)
    return layout.blocks.num_bytes + layout.slots.num_bytes


def candidate_bytes(config):
    """A number and a score of each candidate entry, and of each candidate block."""
    entries = config.index_topk * sum(layer.owns_choice for layer in config.schedule)
    return 8 * (entries + config.candidate_topk_blocks * (config.candidate_source_layer_id >= 0))


def result_bytes(config):
    """A BF16 row and an fp32 number of each head of a compressed layer."""
    num_layers = sum(ratio > 0 for ratio in config.compress_ratios)
    return num_layers * config.num_query_heads * (2 * config.head_dim + 4)


def sent_bytes(config):
    """What a token sends to another rank."""
    return candidate_bytes(config) + result_bytes(config)


def num_exchanges(config):
    return sum((layer.ratio > 0) + layer.owns_choice for layer in config.schedule)


def saved_time(config, num_tokens):
    """Seconds in which a rank reads half of the keys and HCA entries of a token."""
    candidates = config.candidate_topk_blocks * config.candidate_block_size
    num_bytes = 0
    for layer in config.schedule:
        if layer.owns_choice:
            keys = num_tokens // layer.ratio
            keys = min(keys, candidates) if layer.candidates_of >= 0 else keys
            num_bytes += keys * config.index_row.row_bytes
        elif layer.attention_type is AttentionType.HCA:
            num_bytes += num_tokens // layer.ratio * config.entry_row.row_bytes
    return num_bytes / 2 / MEMORY


def break_even(config, link):
    """The least tokens from which on bytes alone pay, and one more than the most if none do."""
    sending = sent_bytes(config) / link
    return bisect_left(range(LONGEST + 1), sending, key=lambda each: saved_time(config, each))


def row(name, *cells):
    """Whether the page has a row of a table."""
    return f"| {name} | {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("name", CONFIGS)
def test_a_request_over_links(name):
    config = CONFIGS[name]
    times = [f"{request_bytes(config, LONGEST) / link * 1e3:.0f} ms" for link in (FAST, SLOW)]
    whole = f"{request_bytes(config, LONGEST):,}"
    assert row(f"{name}, all of it", whole, f"{int(whole.replace(',', '')) / NVLINK * 1e3:.1f} ms",
               *times)  # fmt: skip
    rest = rest_bytes(config)
    assert row(f"{name}, after a prefill that sent its blocks", f"{rest:,}",
               *(f"{rest / link * 1e3:.2f} ms" for link in (NVLINK, FAST, SLOW)))  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_request_on_ranks(name):
    sizes = [f"{request_bytes(CONFIGS[name], LONGEST, ranks):,}" for ranks in (1, 2, 4, 8)]
    assert row(name, *sizes)


def test_a_token_of_a_block():
    sizes = [layout_of(each).blocks.num_bytes / each.block_tokens for each in CONFIGS.values()]
    flash, _, latent = (f"{SLOW / each / 1e6:.1f} million" for each in sizes)
    assert (
        "a block has {:,g} bytes (V4-Flash), {:,} (V4-Pro) or {:g} (V4.1-Flash). So 100 Gb/s carry "
        "the blocks of {} tokens a second of V4-Flash, {} of V4.1-Flash."
    ).format(*sizes, flash, latent) in PAGE
    rests = [f"{rest_bytes(each) / 1e6:.1f} MB" for each in CONFIGS.values()]
    assert f"are left, {rests[0]} of V4-Flash and {rests[2]} of V4.1-Flash." in PAGE
    rates = [f"{20_000 * each / 1e6:.0f} MB/s" for each in sizes]
    assert f"20,000 tokens a second that is {rates[0]} of V4-Flash and {rates[2]} of V4.1-" in PAGE
    worth = [
        f"{round(layout_of(config).slots.num_bytes / size, -2):,.0f}"
        for config, size in zip(CONFIGS.values(), sizes, strict=True)
    ]
    assert f"worth {worth[0]} tokens of blocks of V4-Flash and {worth[2]} of V4.1-Flash" in PAGE


def test_a_token_of_two_ranks():
    def times(link, digits):
        return [f"{sent_bytes(each) / link * 1e6:.{digits}f} µs" for each in CONFIGS.values()]

    for name, count in (
        ("candidates of all layers", candidate_bytes),
        ("results of all layers, BF16", result_bytes), ("exchanges", num_exchanges),
    ):  # fmt: skip
        assert row(name, *(f"{count(each):,}" for each in CONFIGS.values()))
    assert row("NVLink", *times(NVLINK, 1))
    assert row("400 Gb/s", *times(FAST, 0))
    assert row("100 Gb/s", *times(SLOW, 0))
    saved = [f"{saved_time(each, LONGEST) * 1e6:.0f} µs" for each in CONFIGS.values()]
    name = "saved at 1M tokens: half of the keys and HCA entries, at 4.27 TB/s"
    assert row(name, *saved)


@pytest.mark.parametrize("make_config", [ranks.small_config, ranks.latent_config])
def test_a_rank_sends_what_the_page_counts(make_config):
    """A token that sees more than is chosen; the place before each exchange is not counted."""
    sizes = []

    class CountingGroup(Group):
        def allgather(self, outputs, inputs):
            sizes.append(inputs[0].nbytes)
            return super().allgather(outputs, inputs)

    config = make_config()
    num_tokens = 2 * config.block_tokens * 2
    manager = KVCacheManager(
        config, max_requests=1, num_blocks=2, process_group=CountingGroup(),
        max_forward_tokens=num_tokens,
    )  # fmt: skip
    slot, weights = manager.open_request(), model_weights(config, seed=0)
    tokens = model_projections(config, num_tokens, seed=1, dtype=torch.bfloat16)
    run_forward(manager, weights, [Row(slot, tokens, 0, num_tokens - 1)])
    sizes.clear()
    run_forward(manager, weights, [Row(slot, tokens, num_tokens - 1, num_tokens)])
    places, exchanged = sizes[::2], sizes[1::2]
    assert len(exchanged) == num_exchanges(config) and set(places) == {32}
    assert sum(exchanged) == sent_bytes(config)


def test_where_a_split_stops_paying():
    over_nvlink = [f"{round(break_even(each, NVLINK), -3):,}" for each in CONFIGS.values()]
    assert (
        "from {} tokens on with V4-Flash, from {} with V4-Pro, and from {} with V4.1-Flash."
    ).format(*over_nvlink) in PAGE
    assert (
        "Over 400 Gb/s V4-Flash breaks even at its longest context, and the others never." in PAGE
    )
    sending, saved = (
        [count(each) for each in CONFIGS.values()]
        for count in (lambda each: sent_bytes(each) / FAST, lambda each: saved_time(each, LONGEST))
    )
    assert sending[0] == pytest.approx(saved[0], rel=0.02)
    assert all(break_even(each, FAST) > LONGEST for each in [*CONFIGS.values()][1:])
    assert "Over 100 Gb/s none does." in PAGE
    assert all(break_even(each, SLOW) > LONGEST for each in CONFIGS.values())
    config = CONFIGS["V4-Flash"]
    wait = num_exchanges(config) * EXCHANGE
    requests = wait / (saved[0] - sent_bytes(config) / NVLINK)
    assert (
        f"{num_exchanges(config)} of them at 10 µs are {wait * 1e3:.1f} ms a step. At 1M tokens "
        f"{requests:.0f} requests in a batch"
    ) in PAGE
    fit = {
        name: MemoryPlan(each, 1, LONGEST, gpu_bytes=GPU_BYTES).max_requests
        for name, each in CONFIGS.items()
    }
    assert (
        f"holds {fit['V4-Flash']} requests of 1M tokens of V4-Flash, or {fit['V4.1-Flash']} of "
        "V4.1-Flash."
    ) in PAGE


def test_a_chunk_of_two_ranks():
    flash, _, latent = (8192 * sent_bytes(each) for each in CONFIGS.values())
    assert (
        f"of V4-Flash sends {flash / 1e9:.1f} GB: {flash / NVLINK * 1e3:.0f} ms over NVLink, "
        f"{flash / FAST * 1e3:.0f} ms over 400 Gb/s. One of V4.1-Flash sends {latent / 1e9:.1f} GB."
    ) in PAGE


def test_short_requests_beside_a_long_one():
    config = CONFIGS["V4-Flash"]
    token = sent_bytes(config)
    over = [f"{64 * token / link * 1e3:.2g} ms" for link in (NVLINK, FAST)]
    assert over == ["0.4 ms", "3.6 ms"]
    assert "64 of them add 0.40 ms over NVLink and 3.6 ms over 400 Gb/s" in PAGE
    chunk = 2048 * token
    assert (
        f"A prefill of 2,048 tokens sends {chunk / 1e9:.1f} GB: {chunk / NVLINK * 1e3:.1f} ms or "
        f"{chunk / FAST * 1e3:.0f} ms."
    ) in PAGE
    sizes = [request_bytes(config, tokens, ranks) / 1e6 for tokens in (512, 2048)
             for ranks in (1, 2)]  # fmt: skip
    assert (
        f"has {sizes[0]:.1f} MB on every rank at 512 tokens, split over two it has {sizes[1]:.1f} "
        f"MB. At 2,048 tokens, where candidates begin, these are {sizes[2]:.1f} MB and "
        f"{sizes[3]:.1f} MB."
    ) in PAGE


def test_hidden_states():
    sizes = {name: 2 * STREAMS * width for name, width in HIDDEN.items()}
    assert (
        f"{sizes['V4-Flash']:,} bytes (V4-Flash), {sizes['V4-Pro']:,} (V4-Pro) or "
        f"{sizes['V4.1-Flash']:,} (V4.1-Flash) at each cut"
    ) in PAGE
    chunk, step = 8192 * sizes["V4-Flash"], 64 * sizes["V4-Flash"]
    assert (
        f"has {chunk / 1e6:.0f} MB. That is {chunk / NVLINK * 1e3:.1f} ms over NVLink, "
        f"{chunk / FAST * 1e3:.1f} ms over 400 Gb/s and {chunk / SLOW * 1e3:.0f} ms over 100 Gb/s."
    ) in PAGE
    assert (
        f"has {step / 1e6:.1f} MB: {step / NVLINK * 1e6:.0f} µs, {step / FAST * 1e6:.0f} µs and "
        f"{step / SLOW * 1e6:.0f} µs."
    ) in PAGE
    changes = CONFIGS["V4-Flash"].num_layers - 1
    total = changes * sizes["V4-Flash"] / 1e6
    assert f"change it {changes} times, {total:.1f} MB a token" in PAGE
