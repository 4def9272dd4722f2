"""Keys of entries that are gone, remembered for a while: a second coming soon after tells of a mistake."""

from __future__ import annotations

from collections import OrderedDict

_SPARE_KEYS = 64


class Ghosts:
    """Keys and sizes of evicted entries, the oldest forgotten first."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self.size: int = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, key: str, size: int) -> None:
        """Remember `key` as the newest."""
        self.pop(key)
        self._sizes[key] = size
        self.size += size

    def pop(self, key: str) -> bool:
        """Forget `key`; tell whether it was remembered."""
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self.size -= size
        return True

    def trim(self, size: int, keys: int) -> None:
        """Forget the oldest until they stand for at most `size` bytes, and are hardly more than `keys`."""
        while self._sizes and (self.size > size or len(self._sizes) > keys + _SPARE_KEYS):
            _, gone = self._sizes.popitem(last=False)
            self.size -= gone
