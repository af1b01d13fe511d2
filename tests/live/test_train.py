from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.inference.checkpoint import load_checkpoint
from pointsman.live.cluster import current, session
from pointsman.live.environment import make_env, make_evaluate
from pointsman.live.spec import LiveSpec
from pointsman.routing.sources import DEFAULT_CHECKPOINT
from pointsman.training.config import load_train_config
from pointsman.training.networks import build_network
from pointsman.training.safety import SafetyError
from pointsman.training.warm_start import take_over
from tests.cli.conftest import Cli

from .factories import wait_until

NOBODY = "http://127.0.0.1:1"
TRAFFIC: dict[str, Any] = {"arrivals": {"kind": "poisson", "rate": 60}, "max_tokens": 400}
SHORT = (
    "env.decisions=16",
    "run.rollout_steps=16",
    "ppo.minibatch_size=16",
    "ppo.critic_first=1",
    "run.evaluate_every=2",
    "env.evaluation={requests: 8, pairs: 2}",
    "env.margin=20",
    "exploration.temperature=10",  # the shipped policy is so sure of some choices that they teach it nothing
    f"env.workload={json.dumps(TRAFFIC)}",
)
BAD = {
    "workers": (["--workers", 2], "--workers = '2': given beside --live"),
    "preset": (["--preset", "quick"], "--preset = 'quick': given beside --live"),
    "env": (["--env", "jobs"], "--env = 'jobs': given beside --live"),
    "objective": (["--objective", "slo"], "service levels"),
    "no server": (["--minutes", 1], "does not answer"),
    "unknown scenario": (["--scenario", "stedy-chat", "--minutes", 1], "unknown scenario"),
    "two scenarios": (["--scenario", "mixed", "--scenario", "diurnal"], "name one scenario at a time"),
    "a heuristic": (["--start-from", "random"], "was not trained"),
    "more clusters than there are": (["--set", "run.num_envs=4"], "run.num_envs = 4: must be 1"),
    "random decisions": (["--set", "run.settle_steps=9"], "run.settle_steps = 9: must be 0"),
}


def set_options(*changes: str) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


def live_options(servers: list[str]) -> list[str]:
    return [part for url in servers for part in ("--live", url)]


# The command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "problem"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(cli: Cli, tmp_path: Path, arguments: list[object], problem: str) -> None:
    result = cli("train", "--live", NOBODY, *arguments, "--out", tmp_path / "run")
    assert result.status == 2 and result.out == ""
    assert problem in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_a_run_from_start_to_report(cli: Cli, servers: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = cli("train", *live_options(servers), "--steps", 48, "--out", run, *set_options(*SHORT), "--json")
    assert result.status == 0, result.err
    assert result.json["num_decisions"] == 48 and result.json["update"] == 3
    # Where it started is 0 by definition; what follows is measured.
    evaluations = json.loads((run / "evaluation.json").read_text())
    assert evaluations["first"]["eval_score"] == 0
    last = evaluations["last"]
    assert last["eval_standard_error"] > 0
    assert last["eval_min_block_return"] < last["eval_mean_return"] < last["eval_max_block_return"]
    assert last["eval_score"] < last["eval_mean_return"]
    header, *rows = (run / "progress.csv").read_text().splitlines()
    assert len(rows) == 3
    for column in ("reward/outstanding", "reward/waiting", "reward/age", "episode/late_share", "kl_ref"):
        assert column in header
    # It starts from the policy we ship, and is served like it.
    checkpoint = load_checkpoint(run / "checkpoints" / "last.safetensors")
    default = load_checkpoint(DEFAULT_CHECKPOINT)
    assert checkpoint.network == default.network
    assert checkpoint.metadata["hold"] == default.metadata["hold"]
    now, before = (one.arrays["head.score.weight"] for one in (checkpoint, default))
    assert 0 < np.abs(now - before).max() < 0.01

    assert cli("train", "--resume", run, "--steps", 64).status == 0
    assert len((run / "progress.csv").read_text().splitlines()) == 5
    reported = cli("report", run)
    assert reported.status == 0 and (run / "report.html").is_file()
    assert cli("diagnose", run).status in (0, 1)


def test_minutes_too_few_for_one_evaluation_are_refused(cli: Cli, servers: list[str], tmp_path: Path) -> None:
    """At 60 requests/s: 32 of an evaluation, and 16 decisions that are half of the requests."""
    options = [*live_options(servers), "--out", tmp_path / "run", *set_options(*SHORT)]
    result = cli("train", *options, "--minutes", 0.01)
    assert result.status == 2
    assert "--minutes = 0.01: an update and an evaluation take about 0.018 min; give more" in result.err
    assert not (tmp_path / "run").exists()


class Server(BaseHTTPRequestHandler):
    """Answers with one token."""

    status = 200
    delay_s = 0.0

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "m", "object": "model"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(self.delay_s)
        token = {"choices": [{"text": " a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        self._answer(self.status, f"data: {json.dumps(token)}\n\ndata: [DONE]\n\n")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments: object) -> None:
        pass


class Slow(Server):
    delay_s = 0.4


class Broken(Server):
    """Its engine has died."""

    status = 500


@contextmanager
def served(handler: type[Server]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_run_ends_when_requests_fail(cli: Cli, tmp_path: Path) -> None:
    options = ("--steps", 10_000, "--out", tmp_path / "run", *set_options(*SHORT))
    with served(Broken) as url:
        result = cli("train", "--live", url, *options)
    assert result.status == 1
    assert "of the last 200 requests failed" in result.err and "status 50" in result.err


# The guard rails on emulated servers ------------------------------------------------------------------------


@pytest.fixture
def spec(servers: list[str]) -> LiveSpec:
    return LiveSpec(servers=tuple(servers), workload=TRAFFIC, window=20, decisions=16)


def test_a_bad_policy_is_taken_back(spec: LiveSpec) -> None:
    with served(Server) as fast, served(Slow) as slow:
        spec = spec.model_copy(update={"servers": (fast, slow)})
        with session(spec):
            cluster, env = current(), make_env(spec, 1)
            observation = env.reset(0)
            with pytest.raises(SafetyError, match="limit 30 %: that one has taken over"):
                for _ in range(1000):
                    is_legal = observation.action_mask[0]
                    observation = env.step(np.array([2 if is_legal[2] else is_legal.argmax()])).observation
            # Nobody asks it any more, and requests are served on.
            num_asked = cluster.desk.num_asked
            cluster.outcomes.clear()
            wait_until(lambda: len(cluster.outcomes) >= 20)
            assert cluster.desk.num_asked <= num_asked + 1
            assert set(cluster.outcomes) == {None}


def test_requests_do_not_wait_for_a_trainer_that_learns(spec: LiveSpec) -> None:
    with session(spec):
        cluster, env = current(), make_env(spec, 1)
        observation = env.reset(0)
        for number in range(spec.decisions):
            step = env.step(observation.action_mask.argmax(axis=1))
            observation = step.observation
            assert np.isfinite(step.reward).all() and step.elapsed_s[0] > 0
            assert sum(term[0] for term in step.terms.values()) == pytest.approx(step.reward[0], abs=1e-5)
            assert step.truncated[0] == (number + 1 == spec.decisions)
        assert step.episodes[0].length == spec.decisions
        num_asked, num_late, num_done = cluster.desk.num_asked, cluster.desk.num_late, len(cluster.outcomes)
        wait_until(lambda: len(cluster.outcomes) >= num_done + 20)  # while "the trainer learns"
        assert (cluster.desk.num_asked, cluster.desk.num_late) == (num_asked, num_late)
        env.reset(1)
        assert cluster.desk.num_asked == num_asked + 1
        assert set(cluster.outcomes) == {None}


def test_only_legal_actions(spec: LiveSpec) -> None:
    with session(spec):
        env = make_env(spec, 1)
        env.reset(0)
        for action in (-1, 3):
            with pytest.raises(InputError, match="is not legal"):
                env.step(np.array([action]))


def test_an_evaluation_plays_both_policies(spec: LiveSpec) -> None:
    with session(spec):
        default = load_checkpoint(DEFAULT_CHECKPOINT)
        policy, start = current().play(default, num_pairs=2, num_requests=12)
        assert [len(block.tally.spent) for block in (*policy, *start)] == [9, 9, 9, 9]
        assert make_evaluate(spec) is not None
    with pytest.raises(InputError, match="no servers are open"):
        make_env(spec, 1)


# Starting from a policy -------------------------------------------------------------------------------------


def test_taking_over_a_policy() -> None:
    default = load_checkpoint(DEFAULT_CHECKPOINT)
    network = build_network(default.network, default.space, seed=3)
    take_over(network, "default")
    assert all(np.array_equal(tensor, default.arrays[name]) for name, tensor in network.state_dict().items())
    other = build_network(default.network.model_copy(update={"width": 32}), default.space, seed=3)
    with pytest.raises(InputError, match="has another network"):
        take_over(other, "default")


def test_who_learns_on_imitates_nobody_first(cli: Cli) -> None:
    config = load_train_config("quick", ["run.start_from=default"])
    assert config.warm_start is None
    assert config.network == load_checkpoint(DEFAULT_CHECKPOINT).network
    given = ["--start-from", "default", "--set", "warm_start={decisions: 1000}"]
    result = cli("train", "--preset", "quick", *given)
    assert result.status == 2 and "given beside warm_start" in result.err
