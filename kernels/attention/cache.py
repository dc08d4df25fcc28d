"""Keys and values that wait for the tokens to come, while generating."""

from torch import Tensor

from ..parts import AttentionKind
from .full import FULL


class KeyValueCache:
    """Keys and values of the tokens already seen, for one layer, while generating."""

    def __init__(self, max_length: int, kind: AttentionKind = FULL):
        self.max_length, self.length = max_length, 0
        self._keys_values: tuple[Tensor, Tensor] | None = None
        self.state = kind.decoding_state()

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new tokens; returns the keys and values of all tokens so far."""
        if self._keys_values is None:
            B, _, G, K = k_BTGK.shape
            self._keys_values = tuple(k_BTGK.new_empty(B, self.max_length, G, K) for _ in range(2))
        start, self.length = self.length, self.length + k_BTGK.shape[1]
        for stored, new in zip(self._keys_values, (k_BTGK, v_BTGK)):
            stored[:, start : self.length] = new
        return tuple(stored[:, : self.length] for stored in self._keys_values)
