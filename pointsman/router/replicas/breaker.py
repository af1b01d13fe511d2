"""A circuit breaker: after some failures in a row a replica rests, then one request tries it out.

    CLOSED ──failures in a row──► OPEN ──a pause──► HALF_OPEN ──the head of a good answer──► CLOSED
                                   ▲                    │
                                   └─────a failure──────┘

Each pause is twice the one before, until a whole answer has come. What requests do that were sent before the
replica was tried out is no verdict on it: they may run for minutes.
"""

from __future__ import annotations

from pointsman.router.config import Reliability

CLOSED, HALF_OPEN, OPEN = "closed", "half-open", "open"


class Breaker:
    def __init__(self, settings: Reliability) -> None:
        self._settings = settings
        self._num_failures = 0
        self._open_s = settings.breaker_open_s  # of the next pause
        self._until = 0.0
        self.state = CLOSED
        self.is_calm = True  # closed, and the last request has succeeded

    def failed(self, now: float) -> None:
        self._num_failures += 1
        self.is_calm = False
        has_enough = self._num_failures >= self._settings.breaker_failures
        if self.state == HALF_OPEN or (self.state == CLOSED and has_enough):
            self.state = OPEN
            self._until = now + self._open_s
            self._open_s = min(2 * self._open_s, self._settings.breaker_max_open_s)

    def answered(self) -> None:
        """A request that tries it out gets a good answer."""
        if self.state == HALF_OPEN:
            self.state = CLOSED
            self._num_failures = 0

    def succeeded(self) -> None:
        """A good answer is complete."""
        if self.state == CLOSED:
            self._num_failures = 0
            self._open_s = self._settings.breaker_open_s
            self.is_calm = True

    def tick(self, now: float) -> None:
        if self.state == OPEN and now >= self._until:
            self.state = HALF_OPEN
