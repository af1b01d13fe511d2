"""A circuit breaker: after some failures in a row a replica rests, then one request tries it out."""

from __future__ import annotations

from pointsman.router.config import Reliability

CLOSED, HALF_OPEN, OPEN = "closed", "half-open", "open"


class Breaker:
    def __init__(self, settings: Reliability) -> None:
        self._settings = settings
        self._num_failures = 0
        self._open_s = settings.breaker_open_s
        self._until = 0.0
        self.state = CLOSED
        self.is_calm = True  # closed, and the last request has succeeded

    def failed(self, now: float) -> None:
        self._num_failures += 1
        self.is_calm = False
        if self.state == HALF_OPEN:
            self._open_s = min(2 * self._open_s, self._settings.breaker_max_open_s)
            self._open(now)
        elif self.state == CLOSED and self._num_failures >= self._settings.breaker_failures:
            self._open(now)

    def succeeded(self) -> bool:
        """-> whether that closed it. A request that was under way when it opened does not."""
        self._num_failures = 0
        self.is_calm = self.state != OPEN
        if self.state != HALF_OPEN:
            return False
        self.state = CLOSED
        self._open_s = self._settings.breaker_open_s
        return True

    def tick(self, now: float) -> None:
        if self.state == OPEN and now >= self._until:
            self.state = HALF_OPEN

    def _open(self, now: float) -> None:
        self.state = OPEN
        self._until = now + self._open_s
