"""`Columns`: which columns of a padded batch hold tokens, on the host."""

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


class Columns:
    """The columns of a padded batch so far.

    transformers counts columns of tokens and of padding; a request counts tokens alone. The mask
    ends at the last column with padding, so steps without padding cost nothing.
    """

    def __init__(self, batch: int) -> None:
        self.count = 0
        self._is_token: BoolArray = np.ones((batch, 0), dtype=np.bool_)

    def append(self, num_columns: int, is_token: BoolArray | None = None) -> None:
        """Add columns: `is_token` `[batch, num_columns]`, or None if all hold tokens."""
        if is_token is not None:
            self._is_token = np.concatenate((self.read(0, self.count), is_token), axis=1)
        self.count += num_columns

    def read(self, start: int, stop: int) -> BoolArray:
        """Copy the mask of columns, `[batch, stop - start]`."""
        is_token: BoolArray = np.ones((len(self._is_token), stop - start), dtype=np.bool_)
        kept = self._is_token[:, start:stop]
        is_token[:, : kept.shape[1]] = kept
        return is_token

    def drop(self, num_columns: int) -> None:
        """Forget the last columns."""
        self.count -= num_columns
        self._is_token = self._is_token[:, : self.count]

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the batch, in this order."""
        self._is_token = self._is_token[rows]
