"""What the leading process of a router tells the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pointsman.router.config import Backend
from pointsman.router.processes.linking import Follower, Leader
from pointsman.router.replicas.discovery import Discovery, SourceError
from tests.router.harness import Cluster, cluster, get, metric_values, run, until
from tests.router.mock import Behaviour, gated, ok


class Pair:
    """A leading process and one that follows it."""

    def __init__(self, leading: Cluster, following: Cluster, folder: Path) -> None:
        self.leading, self.following = leading, following
        self._folder = folder
        self.follower = Follower(following.router, folder / "leader", 1)
        self.leader = self._new_leader()

    def _new_leader(self) -> Leader:
        return Leader(self.leading.router, self._folder / "leader", self._folder / "notes")

    async def lead_again(self) -> None:
        self.leader = self._new_leader()
        await self.leader.start()


@asynccontextmanager
async def linked(folder: Path, behaviour: Behaviour = ok) -> AsyncIterator[Pair]:
    async with cluster(behaviour) as leading, cluster(behaviour) as following:
        pair = Pair(leading, following, folder)
        await pair.leader.start()
        running = asyncio.ensure_future(pair.follower.run())
        try:
            await asyncio.wait_for(pair.follower.is_informed.wait(), 5)
            yield pair
        finally:
            running.cancel()
            pair.leader.close()
            await asyncio.wait([running])


def test_followers_learn_what_has_changed_of_a_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with linked(tmp_path) as pair:
            ours, theirs = pair.leading.router.registry, pair.following.router.registry
            (url,) = ours.names()
            assert theirs.names() == {url}
            ours.remove(url)
            ours.add(Backend(url=url, calibration={"kv_capacity_tokens": 5000}))
            ours.drain(url, True)
            await until(lambda: any(one.backend.calibration for one in theirs))
            assert theirs.find(url).is_draining
            assert len(theirs) == 1

    run(scenario)


def test_a_server_that_is_back_before_its_requests_have_ended_counts_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with linked(tmp_path, gated) as pair:
            leading, following = pair.leading, pair.following
            ours, theirs = leading.router.registry, following.router.registry
            (url,) = ours.names()

            async def outstanding() -> float:
                text = (await following.ask(get("/metrics"))).body
                samples = [
                    sample
                    for family in text_string_to_metric_families(text.decode())
                    for sample in family.samples
                    if sample.name == "pointsman_replica_outstanding" and sample.labels["replica"] == url
                ]
                (only,) = samples
                return only.value

            await until(lambda: following.router.registry.accepting)
            asked = [asyncio.ensure_future(c.ask()) for c in (following, following, leading)]
            await until(lambda: leading.num_heard == [3])
            assert await outstanding() == 3
            for _ in range(2):
                ours.remove(url)
                await until(lambda: not theirs.names())
                ours.add(Backend(url=url))
                await until(lambda: theirs.names() == {url})
                asked.extend([asyncio.ensure_future(c.ask()) for c in (following, leading)])
                await until(lambda: leading.num_heard == [len(asked)])
                assert await outstanding() == len(asked)
            leading.mocks[0].gate.set()
            assert [(await one).status for one in asked] == [200] * len(asked)
            assert await outstanding() == 0
            assert len(ours) == len(theirs) == 1

    run(scenario)


class Listed:
    def __init__(self, *urls: str) -> None:
        self.urls: list[str] | None = list(urls)

    async def backends(self) -> list[Backend]:
        if self.urls is None:
            raise SourceError("nobody answers")
        return [Backend(url=url) for url in self.urls]


A, B, C, D = (f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4))


def test_a_new_leader_begins_with_what_the_one_before_it_knew(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(ok) as first, cluster(ok) as second:
            (named,) = first.router.registry.names()
            (other,) = second.router.registry.names()  # stands for what the command line of both says
            source = Listed(A, B)
            for c in (first, second):
                c.router.registry.add(Backend(url=D))
            discovery = Discovery(source, first.router.registry, first.router.log, 1.0)
            await discovery.look()
            leader = Leader(first.router, tmp_path / "leader", tmp_path / "notes", discovery.found)
            assert leader.take_over() == []
            await leader.start()
            first.router.registry.remove(D)
            first.router.registry.add(Backend(url=C, calibration={"kv_capacity_tokens": 5000}))
            first.router.registry.drain(named, True)
            first.router.decisions.switch("another")
            first.router.decisions.set_shadow("a shadow")
            await asyncio.sleep(0.01)
            leader.close()

            router = second.router
            heir = Leader(router, tmp_path / "leader", tmp_path / "notes")
            found = heir.take_over()
            assert router.registry.names() == {named, A, B, C} and other not in router.registry.names()
            assert router.registry.find(named).is_draining
            assert router.registry.find(C).backend.calibration == {"kv_capacity_tokens": 5000}
            assert (router.decisions.policy, router.decisions.shadow) == ("another", "a shadow")

            # What came from a source follows it, as before.
            discovery = Discovery(source, router.registry, router.log, 1.0)
            discovery.was_found(found)
            source.urls = None
            await discovery.look()
            assert router.registry.names() == {named, A, B, C}
            source.urls = [B]
            await discovery.look()
            assert router.registry.names() == {named, B, C}

    run(scenario)


def test_without_a_leader_there_are_no_metrics_rather_than_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with linked(tmp_path) as pair:
            following, follower = pair.following, pair.follower
            await until(lambda: following.router.registry.accepting)
            assert (await following.ask()).status == 200
            before = metric_values((await following.ask(get("/metrics"))).body)
            pair.leader.close()
            await until(lambda: follower._writer is None)
            assert (await following.ask()).status == 200
            assert (await following.ask(get("/metrics"))).status == 503
            await pair.lead_again()
            await until(lambda: follower._writer is not None)
            after = metric_values((await following.ask(get("/metrics"))).body)
            (counted,) = {name for name in after if name[0] == "pointsman_requests_total"}
            assert (before[counted], after[counted]) == (1, 2)

    run(scenario)


def test_a_server_that_cannot_be_added_does_not_cost_the_others(tmp_path: Path) -> None:
    """Its certificates were there when it was noted. A follower without a leader goes by the same notes."""
    state = {
        "policy": "fake",
        "shadow": None,
        "replicas": [
            {"backend": {"url": url, **more}, "is_draining": False, "is_found": False}
            for url, more in ((A, {}), ("https://127.0.0.1:5", {"ca": str(tmp_path / "gone.pem")}), (B, {}))
        ],
    }
    notes = tmp_path / "notes"
    notes.write_text(json.dumps(state))

    async def scenario() -> None:
        async with cluster(ok) as c:
            assert Leader(c.router, tmp_path / "leader", notes).take_over() == []
            assert c.router.registry.names() == {A, B}
            assert "gone.pem" in c.log.getvalue()
        async with cluster(ok) as c:
            follower = Follower(c.router, tmp_path / "leader", 1)
            follower.go_by(tmp_path / "none")
            assert not follower.is_informed.is_set()
            follower.go_by(notes)
            assert follower.is_informed.is_set()
            assert c.router.registry.names() == {A, B}

    run(scenario)
