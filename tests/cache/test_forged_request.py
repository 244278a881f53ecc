"""Forged and damaged files of requests: each is refused by one error before anything is taken."""

import dataclasses
import hashlib
import json
import os
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from dsv4 import KVCacheManager
from dsv4.cache import tensor_file
from dsv4.cache.saved_request import SavedRequest, read_any, read_saved, write_saved
from tests.cache.test_saved_request import CONFIG, books, grown_manager, make_manager

LENGTH = 132
ODD_VALUES = [
    None, True, 0, -5, 3.5, float("nan"), float("inf"), 10**400, [], {}, [[]], {"a": {"b": []}},
    ["x"], "", " ", "-5", "-1", "1e3", "1.0", "+3", "0x10", "007", "١٣٢", "nan", "null", "[]", "{}",
    "\ud800", "\0", "9" * 30, "9" * 5000, "[" * 100_000, "x" * 100_000,
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "request.safetensors"


@pytest.fixture
def manager():
    return grown_manager(LENGTH)


def described(path) -> dict:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["request"])


def forge(path, tensors=None, drop=(), **changes) -> None:
    """Write the file again with other metadata or tensors, and a checksum that fits."""
    description = {**described(path), **changes}
    tensors = {**load_file(path), **(tensors or {})}
    for name in drop:
        del description[name]
    if "checksum" not in {*changes, *drop}:
        del description["checksum"]
        description["checksum"] = tensor_file._checksum(description, tensors)
    save_file(tensors, path, {"request": json.dumps(description)})


def refused(manager, path, match="") -> None:
    before = books(manager)
    with pytest.raises(ValueError, match=f"Invalid saved request .*: {match}"):
        manager.load_request(path)
    with pytest.raises(ValueError, match="Invalid saved request"):
        read_any(path)
    assert books(manager) == before


@pytest.mark.parametrize("name", ["slot", "blocks"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.int32, torch.float8_e4m3fn])
def test_tensors_of_another_dtype_take_nothing(manager, path, name, dtype):
    manager.save_request(0, path)
    shape = load_file(path)[name].shape
    forge(path, {name: torch.zeros(shape).to(dtype)})
    refused(manager, path, f"expected {name} ")


SHAPES = [(), (0,), (7,), (2, 3), (2, 3, 4)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("slot", shape) for shape in SHAPES),
        *(("blocks", shape) for shape in SHAPES),
        *(("token_ids", shape) for shape in SHAPES if len(shape) != 1),
    ],
)
def test_tensors_of_another_shape_take_nothing(manager, path, name, shape):
    manager.save_request(0, path)
    dtype = torch.int32 if name == "token_ids" else torch.uint8
    forge(path, {name: torch.zeros(shape, dtype=dtype)})
    refused(manager, path, "expected token_ids" if name == "token_ids" else "expected a slot of")


def test_other_tensors_are_refused(manager, path):
    manager.save_request(0, path)
    forge(path, {"more": torch.zeros(3, dtype=torch.uint8)})
    refused(manager, path, "expected the tensors blocks, slot, token_ids, got")


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"length": "4"}, "expected 1 blocks and a floor from 0 to 4, got 2 and 132"),
        ({"length": "300"}, "expected 3 blocks and a floor from 0 to 300, got 2 and 132"),
        ({"rollback_floor": "133"}, "expected 2 blocks and a floor from 0 to 132, got 2 and 133"),
        ({"rollback_floor": "-1"}, "expected rollback_floor to be a whole number .*, got -1"),
        ({"length": "-5", "rollback_floor": "0"}, "expected length to be a whole number .* got -5"),
        ({"format": "dsv4-request-3"}, "expected the format dsv4-request-4, got dsv4-request-3"),
    ],
)
def test_books_that_cannot_be_are_refused(manager, path, changes, match):
    manager.save_request(0, path)
    forge(path, **changes)
    refused(manager, path, match)


FIELDS = ("format", "kv_format", "index_format", "tail_dtype", "compress_ratios", "block_tokens",
          "drafts_per_step", "config_fingerprint", "length", "rollback_floor", "config",
          "prefix_root", "checksum")  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_odd_metadata(manager, path, field):
    manager.save_request(0, path)
    whole = path.read_bytes()
    for value in ODD_VALUES:
        if (field, value) in (("prefix_root", ""), ("length", str(LENGTH))):
            continue
        path.write_bytes(whole)
        forge(path, **{field: value})
        refused(manager, path)
    path.write_bytes(whole)
    forge(path, drop=[field])
    refused(manager, path)


def test_the_fields_are_all_of_them(manager, path):
    manager.save_request(0, path)
    assert set(described(path)) == set(FIELDS)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(CONFIG)])
def test_odd_configs(manager, path, field):
    manager.save_request(0, path)
    whole = path.read_bytes()
    fields = json.loads(described(path)["config"])
    values = [*ODD_VALUES, 10**6, 10**9, 10**18, [4] * 10**6, {"factor": 10**400}, {"nothing": 1}]
    for value in values:
        if field in fields and value == fields[field]:
            continue
        path.write_bytes(whole)
        forge(path, config=json.dumps({**fields, field: value}))
        with pytest.raises(ValueError, match="Invalid saved request"):
            read_any(path)


@pytest.mark.parametrize("metadata", ODD_VALUES)
def test_odd_descriptions(manager, path, metadata):
    save_file({"slot": torch.zeros(3)}, path, {"request": json.dumps(metadata)})
    refused(manager, path)


def test_odd_bytes(manager, path):
    manager.save_request(0, path)
    whole, rng = path.read_bytes(), random.Random(1)
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 1, header - 9, header - 7, len(whole), 10**8, 2**31, 2**63, 2**64 - 1):
        path.write_bytes(size.to_bytes(8, "little") + whole[8:])
        refused(manager, path)
    for _ in range(150):
        start = rng.choice([0, 8, rng.randrange(header), rng.randrange(len(whole))])
        end = min(start + rng.choice([1, 2, 8, 100]), len(whole))
        damaged = whole[:start] + rng.randbytes(end - start) + whole[end:]
        if (
            damaged[:header].rstrip(b" ") + damaged[header:]
            == whole[:header].rstrip(b" ") + (whole[header:])
        ):
            continue
        path.write_bytes(damaged)
        refused(manager, path)


def test_a_header_of_other_types(manager, path):
    whole = save({"slot": torch.zeros(3, dtype=torch.uint8)}, {"request": "{}"})
    text = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
    for old, new in (
        (b'"{}"', b"7"), (b'{"request":"{}"}', b"[]"), (b'{"request":"{}"}', b"null"),
        (b'"U8"', b'"F4"'), (b'"U8"', b'"C64"'), (b"[3]", b"[-3]"), (b"[0,3]", b"[0,9000000000]"),
        (b"[3]", b"[1e3]"), (text, b"[" * 100_000), (text, b"{}"), (text, b"\xff"),
    ):  # fmt: skip
        header = text.replace(old, new)
        path.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + len(text) :])
        refused(manager, path)


def test_what_was_checked_is_what_is_loaded(manager, path):
    """The file changes in place, after its checksum was compared."""
    manager.save_request(0, path)
    saved = read_saved(path, CONFIG)
    before = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
    for name, tensor in saved.tensors.items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("target", ["folder", "pipe", "link"])
def test_only_regular_files_are_replaced(manager, path, target):
    """No case is a real device: where the check is missing, root would replace it."""
    if target == "folder":
        path.mkdir()
    else:
        pipe = path if target == "pipe" else path.with_name("pipe")
        os.mkfifo(pipe)
        if target == "link":
            path.symlink_to(pipe)
    before = os.lstat(path), sorted(os.listdir(path.parent))
    with pytest.raises(ValueError, match="expected a regular file or none to write to, found a"):
        manager.save_request(0, path)
    assert (os.lstat(path), sorted(os.listdir(path.parent))) == before


def read_of(manager) -> SavedRequest:
    return dataclasses.replace(manager.export_request(0), rollback_floor=LENGTH)


def test_a_link_stays_a_link(manager, path):
    file = path.with_name("file")
    file.touch()
    path.symlink_to(file)
    manager.save_request(0, path)
    assert path.is_symlink() and file.stat().st_size > 0
    assert make_manager().load_request(path) == 0


ROOT = hashlib.sha256(b"salt").hexdigest()


@pytest.mark.parametrize("ids", [[], [5], [-1, 2**31 - 1, 7] * 100])
@pytest.mark.parametrize("root", ["", ROOT])
def test_root_and_ids_are_kept(manager, path, root, ids):
    token_ids = torch.tensor(ids, dtype=torch.int32)
    saved = dataclasses.replace(read_of(manager), prefix_root=root, token_ids=token_ids)
    write_saved(path, saved, CONFIG)
    for read in (read_saved(path, CONFIG), read_any(path)[1]):
        assert read.prefix_root == root and torch.equal(read.token_ids, token_ids)
        assert read.token_ids.dtype == torch.int32


@pytest.mark.parametrize("root", ["0", ROOT[:-2], ROOT + "00", ROOT.upper(), "g" * 64, " " * 64])
def test_a_root_that_is_none(manager, path, root):
    manager.save_request(0, path)
    forge(path, prefix_root=root)
    refused(manager, path, "expected prefix_root to be 64 hex digits or empty, got")


def test_ids_of_another_dtype(manager, path):
    manager.save_request(0, path)
    forge(path, {"token_ids": torch.zeros(4, dtype=torch.uint8)})
    refused(manager, path, r"expected token_ids \[n\] int32, got \[4\] torch.uint8")


def test_only_the_rows_that_are_read_are_kept(path):
    """A token sees the `sliding_window - 1` before it; the row of one more is not in the file."""
    manager: KVCacheManager = grown_manager(300)
    manager.save_request(0, path)
    slot = load_file(path)["slot"]
    for layer in manager.device_memory.layout.layers:
        ring = layer.cut_ring(slot[None]).data[0]
        kept = {row for row in range(layer.ring_rows) if ring[row].any()}
        assert kept == {pos % layer.ring_rows for pos in range(300 - layer.window + 1, 300)}
