"""Compiled work in threads, so that Ctrl-C ends it at once.

Compiled code does not look for signals. It reads its limits from memory at every event, though: whoever sets
them to 0 from another thread ends it within microseconds. The main thread waits for that in short turns,
because polars handles SIGINT such that an endless wait for a lock goes on (SA_RESTART).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

SIGNALS_EVERY_S = 0.1


def run_in_threads(
    work: Callable[[int], None], num_parts: int, num_threads: int, end_early: Callable[[], None]
) -> None:
    """work(0) to work(num_parts - 1); after an exception here or there, `end_early` makes them return."""
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: set[Future[None]] = {pool.submit(work, part) for part in range(num_parts)}
        try:
            while waiting:
                done, waiting = wait(waiting, SIGNALS_EVERY_S, FIRST_EXCEPTION)
                for one in done:
                    one.result()
        except BaseException:
            end_early()
            pool.shutdown(cancel_futures=True)
            raise
