"""What the leading process of a router tells the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pointsman.router.config import Backend
from pointsman.router.processes.linking import Follower, Leader
from tests.router.harness import cluster, get, metric_values, run, until
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


def test_without_a_leader_there_are_no_metrics_rather_than_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(ok) as leading, cluster(ok) as following:
            leader = Leader(leading.router, tmp_path / "leader")
            await leader.start()
            follower = Follower(following.router, tmp_path / "leader", 1)
            running = asyncio.ensure_future(follower.run())
            try:
                await asyncio.wait_for(follower.is_informed.wait(), 5)
                await until(lambda: following.router.registry.accepting)
                assert (await following.ask()).status == 200
                before = metric_values((await following.ask(get("/metrics"))).body)
                leader.close()
                await until(lambda: follower._writer is None)
                assert (await following.ask()).status == 200
                assert (await following.ask(get("/metrics"))).status == 503
                leader = Leader(leading.router, tmp_path / "leader")
                await leader.start()
                await until(lambda: follower._writer is not None)
                after = metric_values((await following.ask(get("/metrics"))).body)
                (counted,) = {name for name in after if name[0] == "pointsman_requests_total"}
                assert (before[counted], after[counted]) == (1, 2)
            finally:
                running.cancel()
                leader.close()
                await asyncio.wait([running])

    run(scenario)
