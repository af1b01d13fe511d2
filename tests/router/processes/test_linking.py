"""What the leading process of a router tells the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pointsman.router.config import Backend
from pointsman.router.processes.linking import Follower, Leader
from tests.router.harness import cluster, run, until
from tests.router.mock import ok


def test_followers_learn_what_has_changed_of_a_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(ok) as leading, cluster(ok) as following:
            ours, theirs = leading.router.registry, following.router.registry
            leader = Leader(leading.router, tmp_path / "leader")
            await leader.start()
            running = asyncio.ensure_future(Follower(following.router, tmp_path / "leader", 1).run())
            (url,) = ours.names()
            try:
                await until(lambda: theirs.names() == {url})
                ours.remove(url)
                ours.add(Backend(url=url, calibration={"kv_capacity_tokens": 5000}))
                ours.drain(url, True)
                await until(lambda: any(one.backend.calibration for one in theirs))
                assert theirs.find(url).is_draining
                assert len(theirs) == 1
            finally:
                running.cancel()
                leader.close()
                await asyncio.wait([running])

    run(scenario)
