"""The key/value cache: a token that is generated attends to the keys and values of the tokens
before it."""

from torch import Tensor


def cache_capacity(max_length: int, reach: int | None) -> int:
    """Returns the tokens that a layer's cache can hold.

    Arguments are as in `KeyValueCache`.
    """
    return max_length if reach is None else min(max_length, 2 * reach)


class KeyValueCache:
    """Keys and values of the tokens seen so far, up to `max_length`, for one layer.

    A new token sees `reach` tokens, itself included; None: all. The cache of a window holds up to
    two windows. When it is full, the last window moves to its beginning.
    """

    def __init__(self, max_length: int, reach: int | None = None):
        self.capacity, self.reach = cache_capacity(max_length, reach), reach
        self.length = 0  # tokens appended so far
        self._held = 0  # the last of them, which are still here
        self._keys_values: tuple[Tensor, Tensor] | None = None

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of new tokens [B, T, G, K]. Returns all that are here, the
        last [B, S, G, K]."""
        if self._keys_values is None:
            B, _, G, K = k_BTGK.shape
            self._keys_values = tuple(k_BTGK.new_empty(B, self.capacity, G, K) for _ in range(2))
        count = k_BTGK.shape[1]
        self.length += count
        if self._held + count > self.capacity and self.reach is not None:
            k_BTGK, v_BTGK = k_BTGK[:, -self.reach :], v_BTGK[:, -self.reach :]
            kept = max(0, min(self._held, self.reach - count))
            for stored in self._keys_values:
                stored[:, :kept] = stored[:, self._held - kept : self._held].clone()
            self._held, count = kept, k_BTGK.shape[1]
        start, self._held = self._held, self._held + count
        for stored, new in zip(self._keys_values, (k_BTGK, v_BTGK)):
            stored[:, start : self._held] = new
        return tuple(stored[:, : self._held] for stored in self._keys_values)
