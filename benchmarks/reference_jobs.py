"""GPU job scheduling in plain Python: lists and dictionaries. What the compiled cluster is held to.

Written from the description of the problem (docs/jobs.md) alone; nothing of `pointsman.jobs` is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Job(NamedTuple):
    arrival: float
    duration: float
    gpus: int
    priority: int
    deadline: float = math.inf

    @property
    def work(self) -> float:
        return self.duration * self.gpus


class Outcome(NamedTuple):
    terms: dict[str, float]
    elapsed: float
    all_done: bool
    cut_off: bool
    invalid: bool

    @property
    def reward(self) -> float:
        return math.fsum(self.terms.values())


@dataclass
class JobsTwin:
    jobs: Sequence[Job]  # in order of arrival
    num_gpus: int = 8
    window: int = 50
    longest: float = 10_000.0
    max_steps: int = 2000
    slack: float = 1.3
    noop_price: float = 0.05
    deadline_price: float = 1.0
    now: float = 0.0
    steps: int = 0
    queue: list[int] = field(default_factory=list)
    to_come: list[int] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)  # of the running jobs, in order of their start
    owner: list[int | None] = field(default_factory=list)  # of each GPU
    done: list[int] = field(default_factory=list)
    started: dict[int, float] = field(default_factory=dict)
    missed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.owner = [None] * self.num_gpus
        self.total = math.fsum(job.work for job in self.jobs)
        self.horizon = self.jobs[-1].arrival + self.slack * self.total / self.num_gpus
        self.to_come = list(range(len(self.jobs)))

    # What there is ------------------------------------------------------------------------------------------

    @property
    def idle(self) -> int:
        return sum(one is None for one in self.owner)

    @property
    def visible(self) -> list[int]:
        return self.queue[: self.window]

    def fits(self, i: int) -> bool:
        return self.jobs[i].gpus <= self.idle

    def legal(self) -> list[bool]:
        slots = [self.fits(i) for i in self.visible]
        return [True, *slots, *[False] * (self.window - len(slots))]

    def available(self) -> float:
        """Share of the episode's work that waits or is left to do of what runs."""
        waiting = math.fsum(self.jobs[i].work for i in self.queue)
        running = math.fsum((end - self.now) * self.jobs[i].gpus for i, end in self.ends.items())
        return (waiting + running) / self.total

    # What happens -------------------------------------------------------------------------------------------

    def step(self, action: int) -> Outcome:
        invalid = not (0 <= action <= self.window and self.legal()[action])
        could_start = any(self.legal()[1:])
        starts = action > 0 and not invalid
        if starts:
            self.start(self.visible[action - 1])
        before = self.now
        completed = self.next_event()
        self.steps += 1
        elapsed = self.now - before
        all_done = not (self.queue or self.ends or self.to_come)
        cut_off = not all_done and (self.now >= self.horizon or self.steps >= self.max_steps)
        newly_missed = self.too_late(cut_off) - self.missed
        self.missed |= newly_missed
        num_deadlines = sum(job.deadline < math.inf for job in self.jobs)
        unfinished = self.total - math.fsum(self.jobs[i].work for i in self.done)
        terms = {
            "completed": completed / self.total,
            "holding": -elapsed / self.horizon * self.available(),
            "noop": -self.noop_price * self.available() if could_start and not starts else 0.0,
            "finished": max(0.0, (self.horizon - self.now) / self.horizon) if all_done else 0.0,
            "unfinished": -unfinished / self.total if cut_off else 0.0,
            "missed": -self.deadline_price * len(newly_missed) / max(1, num_deadlines),
        }
        return Outcome(terms, elapsed, all_done, cut_off, invalid)

    def too_late(self, cut_off: bool) -> set[int]:
        """The jobs that have a deadline and miss it, as far as that is known."""
        late = {i for i, at in self.started.items() if at + self.jobs[i].duration > self.jobs[i].deadline}
        if cut_off:
            return late | {
                i for i, job in enumerate(self.jobs) if i not in self.started and job.deadline < math.inf
            }
        return late | {i for i in self.queue if not self.meets(i)}

    def meets(self, i: int) -> bool:
        """Whether it ends by its deadline if it starts now."""
        return self.now + self.jobs[i].duration <= self.jobs[i].deadline

    def start(self, i: int) -> None:
        self.queue.remove(i)
        free = [gpu for gpu, owner in enumerate(self.owner) if owner is None]
        for gpu in free[: self.jobs[i].gpus]:
            self.owner[gpu] = i
        self.ends[i] = self.now + self.jobs[i].duration
        self.started[i] = self.now

    def next_event(self) -> float:
        """The work that it completes."""
        first_end = min(self.ends.values(), default=math.inf)
        next_arrival = self.jobs[self.to_come[0]].arrival if self.to_come else math.inf
        if first_end == next_arrival == math.inf:
            return 0.0
        if first_end <= next_arrival:
            self.now = first_end
            i = next(i for i, end in self.ends.items() if end == first_end)
            del self.ends[i]
            self.owner = [None if owner == i else owner for owner in self.owner]
            self.done.append(i)
            return self.jobs[i].work
        self.now = next_arrival
        self.queue.append(self.to_come.pop(0))
        return 0.0

    # What is seen -------------------------------------------------------------------------------------------

    def free_in(self) -> list[float]:
        """Of each GPU."""
        return [0.0 if owner is None else self.ends[owner] - self.now for owner in self.owner]

    def lookahead(self, mode: str) -> list[float]:
        times = [time / self.longest for time in self.free_in()]
        if mode == "per_gpu":
            return times
        if mode == "sorted":
            return sorted(times)
        if mode == "cdf":
            limits = [(k + 1) / self.num_gpus for k in range(self.num_gpus)]
            return [sum(time <= limit for time in times) / self.num_gpus for limit in limits]
        return [0.0] * self.num_gpus

    def job_rows(self, has_all: bool, has_deadlines: bool = False) -> list[list[float]]:
        return [
            [
                *self.job_row(i, has_all),
                *(self.deadline_row(i) if has_deadlines else []),
                *(self.rule_row(i) if has_all else []),
            ]
            for i in self.visible
        ]

    def rule_row(self, i: int) -> list[float]:
        job = self.jobs[i]
        return [-1 - (job.gpus / self.num_gpus - job.duration / self.longest / 2) / 4]

    def deadline_row(self, i: int) -> list[float]:
        job, due = self.jobs[i], [k for k in self.visible if self.meets(k)]
        due = [k for k in due if self.jobs[k].deadline < math.inf]
        sooner = [k for k in due if i not in due or self.jobs[k].deadline < job.deadline]
        slack = job.deadline - self.now - job.duration
        share = 1.0 if slack == math.inf else slack / (abs(slack) + job.duration)
        return [float(i in due), share, len(sooner) / len(self.visible)]

    def job_row(self, i: int, has_all: bool) -> list[float]:
        job, others = self.jobs[i], [self.jobs[k] for k in self.visible]
        row = [job.duration / self.longest, job.priority / 10, job.gpus / self.num_gpus]
        row.append((self.now - job.arrival) / self.horizon)
        if not has_all:
            return row
        free_in = sorted(self.free_in())
        ends = sorted(end - self.now for end in self.ends.values())
        next_end, last_end = (ends[0], ends[-1]) if ends else (0.0, 0.0)
        work_share = job.work / (self.num_gpus * self.longest)
        return [
            *row,
            max(0.0, 1 + math.log10(job.duration / self.longest) / 3),
            max(0.0, 1 + math.log10(work_share) / 4),
            -1.0 if self.fits(i) else (job.gpus - self.idle) / self.num_gpus,
            (self.idle - job.gpus) / self.num_gpus,
            float(job.gpus == self.idle),
            free_in[job.gpus - 1] / self.longest,
            (job.duration - next_end) / (job.duration + next_end),
            (job.duration - last_end) / (job.duration + last_end),
            sum(other.gpus > job.gpus for other in others) / len(others),
            sum(other.duration > job.duration for other in others) / len(others),
        ]

    def context(self, mode: str, has_all: bool) -> list[float]:
        row = [*self.lookahead(mode), self.idle / self.num_gpus, 1 - self.idle / self.num_gpus]
        if not has_all:
            return row
        first = min(self.ends, key=lambda i: self.ends[i], default=None)
        scale = self.num_gpus * self.longest
        running = math.fsum((end - self.now) * self.jobs[i].gpus for i, end in self.ends.items())
        waiting = math.fsum(self.jobs[i].work for i in self.queue)
        return [
            *row,
            len(self.ends) / self.num_gpus,
            0.0 if first is None else (self.ends[first] - self.now) / self.longest,
            0.0 if first is None else self.jobs[first].gpus / self.num_gpus,
            running / scale,
            math.log2(1 + len(self.queue) / 16),
            math.log2(1 + max(0, len(self.queue) - self.window) / 16),
            math.log2(1 + waiting / scale),
            sum(self.legal()[1:]) / max(1, len(self.visible)),
            1 - len(self.to_come) / len(self.jobs),
            max(0.0, 1 - self.now / self.horizon),
            float(not self.ends and not self.to_come),
        ]


# Heuristics: the slot of the window to start, counted from 1; 0 for none -----------------------------------


def best_by(score: Callable[[JobsTwin, Job], float]) -> Callable[[JobsTwin], int]:
    """Highest score of those that fit; the first of equals."""

    def choose(twin: JobsTwin) -> int:
        slots = [k for k, i in enumerate(twin.visible) if twin.fits(i)]
        return 1 + max(slots, key=lambda k: score(twin, twin.jobs[twin.visible[k]]), default=-1)

    return choose


def easy_backfill(twin: JobsTwin) -> int:
    if not twin.queue:
        return 0
    if twin.fits(twin.queue[0]):
        return 1
    head = twin.jobs[twin.queue[0]]
    times = sorted({0.0, *twin.free_in()})
    free_at = {time: sum(free <= time for free in twin.free_in()) for time in times}
    reserved = next(time for time in times if free_at[time] >= head.gpus)
    for k, i in enumerate(twin.visible):
        job = twin.jobs[i]
        ends_before = job.duration <= reserved
        leaves_enough = free_at[reserved] - job.gpus >= head.gpus
        if k > 0 and twin.fits(i) and (ends_before or leaves_enough):
            return k + 1
    return 0


def earliest_deadline(twin: JobsTwin) -> int:
    """Deadlines that are lost already count no more than none."""

    def due(k: int) -> float:
        i = twin.visible[k]
        return twin.jobs[i].deadline if twin.meets(i) else math.inf

    return 1 + min((k for k, i in enumerate(twin.visible) if twin.fits(i)), key=due, default=-1)


HEURISTICS: dict[str, Callable[[JobsTwin], int]] = {
    "fifo": best_by(lambda twin, job: 0.0),
    "sjf": best_by(lambda twin, job: -job.duration),
    "smallest-work-first": best_by(lambda twin, job: -job.work),
    "most-gpus-first": best_by(lambda twin, job: job.gpus),
    "wide-and-short": best_by(lambda twin, job: job.gpus / twin.num_gpus - 0.5 * job.duration / twin.longest),
    "easy-backfill": easy_backfill,
    "best-fit": best_by(lambda twin, job: (-(twin.idle - job.gpus), job.duration)),
    "priority-first": best_by(lambda twin, job: job.priority),
    "earliest-deadline": earliest_deadline,
}
