"""Numbers of docs/scale.md that follow from a config, on the page as they are computed here."""

import re
from pathlib import Path

import pytest

from dsv4 import CacheConfig
from dsv4.cache.memory.layout import cache_layout
from dsv4.cache.memory.schema import build_schemas
from dsv4.tools.planner.memory_plan import MemoryPlan

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "scale.md").read_text().split())
LONGEST = 1 << 20
NVLINK, FAST, SLOW = 450e9, 50e9, 12.5e9  # bytes a second
CONFIGS = {
    "V4-Flash": CacheConfig.v4_flash(), "V4-Pro": CacheConfig.v4_pro(),
    "V4.1-Flash": CacheConfig.v41_flash(),
}  # fmt: skip
HIDDEN = {"V4-Flash": 4096, "V4-Pro": 7168}
STREAMS = 4  # hc_mult


def request_bytes(config, tokens, num_ranks=1):
    share = config.split_context(0, num_ranks)
    return MemoryPlan(share, 1, tokens, gpu_bytes=10**12).one_request().allocated


def rest_bytes(config):
    """What is left after the prefill: the last block and the fixed state."""
    layout = cache_layout(config, build_schemas(config))
    return layout.blocks.num_bytes + layout.slots.num_bytes


def result_bytes(config):
    num_layers = sum(ratio > 0 for ratio in config.compress_ratios)
    return num_layers * config.num_query_heads * (2 * config.head_dim + 4)


def row(name, *cells):
    """Whether the page has a row of a table."""
    return f"| {name} | {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("name", ["V4-Flash", "V4-Pro"])
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


def test_a_token_of_two_ranks():
    results = {name: result_bytes(config) for name, config in CONFIGS.items()}
    assert row("results of all layers, BF16", *(f"{each:,}" for each in results.values()))
    listed = re.search(r"\| candidates of all layers \| (.*?) \| \|", PAGE)[1]
    candidates = [int(each.replace(",", "")) for each in listed.split(" | ")]
    for name in ("V4-Flash", "V4-Pro"):
        config = CONFIGS[name]
        assert candidates[[*CONFIGS].index(name)] == (
            8 * config.index_topk * config.compress_ratios.count(4)
        )
    wire = [sum(each) for each in zip(candidates, results.values(), strict=True)]
    assert row("NVLink", *(f"{each / NVLINK * 1e6:.1f} µs" for each in wire))
    assert row("400 Gb/s", *(f"{each / FAST * 1e6:.0f} µs" for each in wire))
    assert row("100 Gb/s", *(f"{each / SLOW * 1e6:.0f} µs" for each in wire))


def test_short_requests_beside_a_long_one():
    config = CONFIGS["V4-Flash"]
    token = result_bytes(config) + 8 * config.index_topk * config.compress_ratios.count(4)
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
        f"{sizes['V4-Flash']:,} bytes (V4-Flash) or {sizes['V4-Pro']:,} (V4-Pro) at each cut"
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
