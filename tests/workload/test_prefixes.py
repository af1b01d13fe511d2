"""What prompts have in common: drawn, read, cut and repeated."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.workload import Workload, build_workload, sample_lengths
from pointsman.workload.readers import read_trace
from pointsman.workload.replay import take
from pointsman.workload.spec import TraceFile

from .factories import TRACES, spec, synthetic

CHAT = {"systems": {"count": 5, "tokens": 200, "cv": 0.5}, "turns": 4.0, "think_s": 7.0}
RAG = {"systems": {"count": 1, "tokens": 50}, "documents": {"count": 30, "tokens": 100, "per_request": 3}}


def chain(workload: Workload, i: int) -> list[tuple[int, int]]:
    rows = slice(workload.chain_start[i], workload.chain_start[i] + workload.chain_length[i])
    return list(zip(workload.link_key[rows].tolist(), workload.link_tokens[rows].tolist(), strict=True))


def check(workload: Workload) -> None:
    """What holds for any chains: prefixes grow within the prompt, and a key stands for one length."""
    tokens_of: dict[int, int] = {}
    for i, prompt in enumerate(workload.num_prefill_tokens):
        links = chain(workload, i)
        lengths = [0, *(tokens for _, tokens in links), int(prompt)]
        assert all(one < two for one, two in pairwise(lengths[:-1]))
        assert lengths[-2] <= lengths[-1]
        for key, tokens in links:
            assert key != 0
            assert tokens_of.setdefault(key, tokens) == tokens


def check_turns(workload: Workload) -> None:
    """The next turn begins with everything that was said, and stands behind all first turns."""
    num_first = len(workload) - workload.num_later_turns
    followers = workload.next_turn[workload.next_turn >= 0]
    assert sorted(followers.tolist()) == list(range(num_first, len(workload)))
    for i, later in enumerate(workload.next_turn.tolist()):
        if later < 0:
            assert workload.answer_key[i] == 0
            continue
        said = int(workload.num_prefill_tokens[i] + workload.num_decode_tokens[i])
        assert chain(workload, later) == [*chain(workload, i), (int(workload.answer_key[i]), said)]
        assert workload.num_prefill_tokens[later] > said
        assert workload.session[later] == workload.session[i]


def test_sessions_grow_by_what_was_said() -> None:
    workload = build_workload(synthetic(requests=3000, prefixes=CHAT), 0)
    assert len(workload) == 3000
    check(workload)
    check_turns(workload)
    assert np.bincount(workload.session).mean() == pytest.approx(4.0, rel=0.1)
    later = workload.think_s[-workload.num_later_turns :]
    assert later.mean() == pytest.approx(7.0, rel=0.1)
    num_first = len(workload) - workload.num_later_turns
    assert np.all(np.diff(workload.arrived_at) >= 0)
    # Requests come at the rate that was asked for, sessions at a fourth of it.
    assert num_first / workload.arrived_at[num_first - 1] == pytest.approx(10.0 / 4.0, rel=0.15)


def test_a_session_ends_where_the_context_does() -> None:
    prefixes = CHAT | {"turns": 30.0, "context_tokens": 1000}
    workload = build_workload(synthetic(requests=500, prefixes=prefixes), 1)
    check(workload)
    check_turns(workload)
    assert (workload.num_prefill_tokens + workload.num_decode_tokens).max() <= 1000
    assert len(np.unique(workload.session)) > 500 / 30


def test_system_prompts_are_as_popular_as_zipf_says() -> None:
    prefixes = {"systems": {"count": 3, "tokens": 64, "zipf": 1.0}}
    workload = build_workload(synthetic(requests=6000, prefixes=prefixes), 0)
    check(workload)
    _, counts = np.unique(workload.link_key, return_counts=True)
    assert np.sort(counts)[::-1] / 6000 == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)
    assert np.all(workload.num_prefill_tokens == 164)
    assert len(workload.next_turn) == 0


def test_documents_of_a_prompt_differ_and_their_order_counts() -> None:
    workload = build_workload(synthetic(requests=2000, prefixes=RAG), 0)
    check(workload)
    assert np.all(workload.chain_length == 4)
    assert np.all(workload.num_prefill_tokens == 50 + 300 + 100)
    first, second = (len({chain(workload, i)[depth][0] for i in range(2000)}) for depth in (1, 2))
    assert first == 30
    assert 30 < second <= 30 * 29


def test_the_same_seed_gives_the_same_and_other_lengths_keep_what_is_shared() -> None:
    one, same = (build_workload(synthetic(requests=300, prefixes=CHAT), 3) for _ in range(2))
    for name in ("num_prefill_tokens", "link_key", "link_tokens", "think_s", "next_turn"):
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
    assert not np.array_equal(
        one.link_key, build_workload(synthetic(requests=300, prefixes=CHAT), 4).link_key
    )


def test_capacity_is_found_for_whole_prompts() -> None:
    described = synthetic(requests=400, prefixes=CHAT)
    prompts, outputs = sample_lengths(described, 400, 0)
    workload = build_workload(described, 0)
    np.testing.assert_array_equal(prompts, workload.num_prefill_tokens)
    np.testing.assert_array_equal(outputs, workload.num_decode_tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefixes": {}}, "nothing is shared"),
        ({"prefixes": CHAT, "max_tokens": 500}, "context_tokens"),
        ({"prefixes": CHAT, "duration_s": 5.0}, "a number of requests"),
        ({"prefixes": CHAT, "arrivals": {"kind": "closed", "users": 3}, "requests": 10}, "rate of arrivals"),
        ({"prefixes": {"systems": {"count": 0, "tokens": 5}}}, "count"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        synthetic(**changes)


def test_some_sessions_of_many() -> None:
    workload = build_workload(synthetic(requests=1000, prefixes=CHAT), 0)
    part = take(workload, slice(100, 400))
    check(part)
    check_turns(part)
    assert 250 < len(part) <= 300


# Traces.


def hashes_file(folder: Path, *rows: tuple[int, list[Any]], **options: Any) -> TraceFile:
    path = folder / "trace.jsonl"
    lines = [
        {"timestamp": i, "input_length": prompt, "output_length": 5, "hash_ids": hashes}
        for i, (prompt, hashes) in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return TraceFile(path=str(path), **options)


def test_links_are_where_prompts_part(tmp_path: Path) -> None:
    file = hashes_file(
        tmp_path,
        (2000, [1, 2, 3, 4]),
        (1800, [1, 2, 3, 9]),
        (600, [1, 5]),
        (100, [7]),
        (600, [1, 5]),
        (700, [2, 3]),  # not after 1: shares nothing
    )
    workload = read_trace(file)
    check(workload)
    chains = [chain(workload, i) for i in range(6)]
    assert [[tokens for _, tokens in links] for links in chains] == [[512, 1536]] * 2 + [
        [512, 600],
        [],
        [512, 600],
        [],
    ]
    assert chains[0] == chains[1]
    assert chains[2] == chains[4]
    assert chains[0][0] == chains[2][0]


def test_hashes_may_be_text_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "arrived_at,prompt_tokens,output_tokens,block_hashes\n0,40,5,ab12 cd34\n1,40,5,ab12 ff\n2,40,5,\n"
    )
    workload = read_trace(TraceFile(path=str(path), block_tokens=16))
    assert workload.chain_length.tolist() == [1, 1, 0]
    assert workload.link_tokens.tolist() == [16, 16]
    with pytest.raises(InputError, match="block_tokens"):
        read_trace(TraceFile(path=str(path)))
    with pytest.raises(InputError, match="more blocks than the prompt has"):
        read_trace(TraceFile(path=str(path), block_tokens=64))


def test_a_trace_is_cut_and_repeated_with_its_links(tmp_path: Path) -> None:
    file = hashes_file(tmp_path, (1024, [1, 2]), (1024, [1, 2]), (512, [1]))
    once = build_workload(spec(trace=file.model_dump()), 0)
    assert [tokens for _, tokens in chain(once, 0)] == [512, 1024]
    clipped = build_workload(spec(trace=file.model_dump(), max_tokens=700), 0)
    assert [len(chain(clipped, i)) for i in range(3)] == [1, 1, 1]
    check(clipped)
    twice = build_workload(spec(trace=file.model_dump() | {"repeat": 2}), 0)
    check(twice)
    assert [tokens for _, tokens in chain(twice, 3)] == [512, 1024]
    assert {key for key, _ in chain(twice, 0)}.isdisjoint(key for key, _ in chain(twice, 3))
    late = build_workload(spec(trace=file.model_dump() | {"begin": 0.34}), 0)
    assert len(late) == 2
    assert chain(late, 1) == chain(once, 2)


def test_the_trace_in_the_package_shares_what_mooncakes_own_does() -> None:
    shipped = read_trace(TraceFile(path="mooncake-conversation"))
    assert len(shipped) == 12_031
    path = TRACES / "mooncake_conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("needs ../shared/traces")
    original = read_trace(TraceFile(path=str(path)))
    for name in ("arrived_at", "num_prefill_tokens", "num_decode_tokens", "chain_length", "link_tokens"):
        np.testing.assert_array_equal(getattr(shipped, name), getattr(original, name))
    _, ours = np.unique(shipped.link_key, return_inverse=True)
    _, theirs = np.unique(original.link_key, return_inverse=True)
    assert (
        len(np.unique(ours)) == len(np.unique(theirs)) == len(np.unique(np.stack((ours, theirs), 1), axis=0))
    )
