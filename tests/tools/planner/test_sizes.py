"""Parsing and formatting of sizes, and GPUs by name."""

import pytest

from dsv4.tools.planner.sizes import (
    GPU_BYTES,
    format_bytes,
    parse_bytes,
    parse_gpu,
    parse_tokens,
    short_bytes,
    short_tokens,
)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1), ("4096", 4096), ("1M", 1048576), ("128k", 131072), ("128K", 131072),
        ("1.5k", 1536), ("0.5m", 524288), (" 2 M ", 2097152), ("1,048,576", 1048576),
        ("1_000", 1000),
    ],
)  # fmt: skip
def test_tokens(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "0", "k", "-1", "1G", "1e6", "1.0001k", "12 tokens", "1,00", "1,0000", "1k2", "٣"]
)
def test_refuses_what_is_no_number_of_tokens(text):
    with pytest.raises(ValueError, match="expected a number of tokens such as 4096, 128k or 1M"):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0), ("0GB", 0), ("12B", 12), ("141GB", 141 * 10**9), ("141gb", 141 * 10**9),
        ("80GiB", 80 * 2**30), ("1.5 TiB", 3 * 2**39), ("512MiB", 2**29), ("3kB", 3000),
        ("4KiB", 4096), ("139.8GB", 139_800_000_000), ("1TB", 10**12), ("2mb", 2 * 10**6),
    ],
)  # fmt: skip
def test_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "80", "80G", "GB", "-1GB", "1.5B", "1 GB free", "h200", "1Gb/s"]
)
def test_refuses_what_is_no_size(text):
    with pytest.raises(ValueError, match="expected a size such as 80GiB or 141GB, got"):
        parse_bytes(text)


def test_gpus():
    assert parse_gpu("h200") == parse_gpu("H200") == parse_gpu("141GB") == 141 * 10**9
    assert parse_gpu("h100") == 80 * 10**9
    assert parse_gpu("139GiB") == 139 * 2**30
    assert all(size % 10**9 == 0 for size in GPU_BYTES.values())


@pytest.mark.parametrize("text", ["h300", "80", "0", "0GB"])
def test_refuses_what_is_no_gpu(text):
    with pytest.raises(
        ValueError, match=r"expected a size such as .*, or one of a100.*h200.*, got"
    ):
        parse_gpu(text)


@pytest.mark.parametrize(
    ("tokens", "text"), [(2**20, "1M"), (3 * 2**20, "3M"), (131072, "128k"), (1000, "1000")]
)
def test_short_tokens(tokens, text):
    assert short_tokens(tokens) == text and parse_tokens(text) == tokens


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0"), (160 * 10**9, "160GB"), (80 * 2**30, "80GiB"), (1024, "1KiB"), (1001, "1001B"),
        (5000, "5kB"), (2**41, "2TiB"),
    ],
)  # fmt: skip
def test_short_bytes(num_bytes, text):
    assert short_bytes(num_bytes) == text and parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.000 KiB"), (1536 * 2**10, "1.500 MiB"),
        (2**30, "1.000 GiB"), (2**42, "4,096.000 GiB"),
    ],
)  # fmt: skip
def test_sizes_for_reading(num_bytes, text):
    assert format_bytes(num_bytes) == text
