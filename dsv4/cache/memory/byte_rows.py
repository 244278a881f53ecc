"""`byte_rows`: the memory of a pool, allocated or the caller's."""

import torch


def byte_rows(
    name: str,
    num_rows: int,
    row_bytes: int,
    device: torch.device,
    storage: torch.Tensor | None,
) -> torch.Tensor:
    """Return rows of bytes `[num_rows, row_bytes]`: the caller's `storage`, or new ones."""
    if storage is None:
        return torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=device)
    shape = (num_rows, row_bytes)
    is_right = tuple(storage.shape) == shape and storage.dtype == torch.uint8
    is_there = storage.device == torch.empty(0, device=device).device
    if not is_right or not is_there or not storage.is_contiguous():
        raise ValueError(
            f"Invalid storage of {name}: expected {list(shape)} contiguous uint8 on {device}, got "
            f"{list(storage.shape)} {storage.dtype} on {storage.device}"
        )
    return storage
