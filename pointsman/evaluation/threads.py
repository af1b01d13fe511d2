"""Compiled work in threads: the main thread only waits, so that Ctrl-C reaches it at once.

Compiled code does not look for signals. It reads its limits from memory at every event, though: whoever sets
them to 0 from another thread ends it within microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def run_in_threads(
    work: Callable[[int], None], num_parts: int, num_threads: int, end_early: Callable[[], None]
) -> None:
    """work(0) to work(num_parts - 1); after an exception here or there, `end_early` makes them return."""
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            list(pool.map(work, range(num_parts)))
        except BaseException:
            end_early()
            raise
