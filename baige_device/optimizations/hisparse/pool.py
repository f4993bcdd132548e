"""A pool of numbered things with exact accounting."""

from __future__ import annotations

from collections.abc import Iterable

from baige_device.errors import BaigeError

__all__ = ["Pool"]


class Pool:
    """Numbers 0 to size - 1, each held by at most one owner."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._held = [False] * size

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` numbers. The caller has checked `free`; taking more is an error and takes nothing."""
        if count > len(self._free):
            raise BaigeError(f"{self.name}: expected at most {len(self._free)} free, asked for {count}")
        taken = [self._free.pop() for _ in range(count)]
        for number in taken:
            self._held[number] = True
        return taken

    def give(self, numbers: Iterable[int]) -> None:
        """Return numbers. One that is not held is an error, and nothing is returned."""
        numbers = list(numbers)
        for number in numbers:
            if not 0 <= number < self.size or not self._held[number]:
                raise BaigeError(f"{self.name}: {number} is returned and not held")
        if len(set(numbers)) != len(numbers):
            raise BaigeError(f"{self.name}: a number is returned twice: {numbers}")
        for number in numbers:
            self._held[number] = False
        self._free += reversed(numbers)
