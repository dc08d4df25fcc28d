"""The key/value cache: a token that is generated attends to the keys and values of the tokens before it."""

from torch import Tensor


class KeyValueCache:
    """Keys and values of the tokens seen so far, for one layer.

    Args:
        max_length: most tokens that the cache has room for.
    """

    def __init__(self, max_length: int):
        self.max_length, self.length = max_length, 0
        self._keys_values: tuple[Tensor, Tensor] | None = None

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of new tokens [B, T, G, K]; returns all of them so far, [B, S, G, K]."""
        if self._keys_values is None:
            B, _, G, K = k_BTGK.shape
            self._keys_values = tuple(k_BTGK.new_empty(B, self.max_length, G, K) for _ in range(2))
        start, self.length = self.length, self.length + k_BTGK.shape[1]
        for stored, new in zip(self._keys_values, (k_BTGK, v_BTGK)):
            stored[:, start : self.length] = new
        return tuple(stored[:, : self.length] for stored in self._keys_values)
