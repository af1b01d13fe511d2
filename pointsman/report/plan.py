"""What `pointsman plan` answers: sentences first, then tables and figures; and its files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pointsman.config import Config
from pointsman.evaluation.bootstrap import LEVEL, MIN_SEEDS, NUM_RESAMPLES, Ratio, with_intervals
from pointsman.evaluation.goodput import Goodput, best_of
from pointsman.experiments.setting import cluster_text
from pointsman.plain import provenance
from pointsman.report.appraisal import Verdict
from pointsman.report.figure import Axis, Bar, Figure, Level, Line, linear_axis, linear_ticks, row_axis
from pointsman.report.page import Section, escape, page, paragraphs, table, unbroken, write_report
from pointsman.report.plots import ROW_HEIGHT, styles
from pointsman.report.tables import change, direction, listed, markdown, number, percent, sample_text

CLEAR = 1.02  # times as much, two steps of the search: without an interval, less may be chance
HIGHEST_TRIED, NONE = "highest tried", "none"  # in tables
POLICY_COLUMNS = ("requests/s", "interval", "of capacity", "change")
KIND_COLUMNS = ("one more buys", "interval")


@dataclass(frozen=True)
class PlanReport:
    """Goodputs by policy and, with the best of them, by the kind of server that there is one more of."""

    name: str
    config: Config
    seeds: Sequence[int]
    share: float
    traffic_rps: float  # as the file has it
    target_rps: float
    baseline: str
    policies: Mapping[str, Goodput]
    one_more: Mapping[str, Goodput]
    servers: Mapping[str, int | None]  # how many more of a kind the target takes; None: that kind cannot
    counts: Mapping[str, int]  # of each kind, now
    is_shared: bool  # prompts have prefixes in common
    command: str
    warnings: Sequence[str] = ()

    @property
    def cluster(self) -> str:
        return cluster_text(self.config.cluster)

    @property
    def num_samples(self) -> int:
        return self.policies[self.baseline].num_samples

    @property
    def best(self) -> str:
        return best_of(self.policies, self.baseline)

    @cached_property
    def changes(self) -> dict[str, Ratio]:
        """How each policy's goodput differs from the baseline's."""
        base = self.policies[self.baseline]
        return {name: self._over(one, base) for name, one in self.policies.items()}

    def _over(self, one: Goodput, other: Goodput) -> Ratio:
        if one.serves_none or other.serves_none:
            return Ratio(math.nan, math.nan, math.nan)
        ratio = np.array([one.rate_rps / other.rate_rps])
        with np.errstate(divide="ignore", invalid="ignore"):
            samples = np.where(other.resampled_rps > 0, one.resampled_rps / other.resampled_rps, math.nan)
        return with_intervals(ratio, samples[:, None], self.num_samples)[0]

    @cached_property
    def gains(self) -> dict[str, Ratio]:
        """Requests/s that one more server of each kind buys."""
        now, found = self.policies[self.best], {}
        for kind, one in self.one_more.items():
            samples = (one.resampled_rps - now.resampled_rps)[:, None]
            gained = np.array([one.rate_rps - now.rate_rps])
            found[kind] = with_intervals(gained, samples, self.num_samples)[0]
        return found

    # In words -----------------------------------------------------------------------------------------------

    @property
    def level_text(self) -> str:
        slo = self.config.slo
        return (
            f"{100 * self.share:g} % of the requests have their first token within {slo.ttft_s:g} s and take "
            f"at most {slo.tpot_s:g} s a token"
        )

    @property
    def is_hopeless(self) -> bool:
        """No policy keeps the service level, however little there is to do."""
        return self.policies[self.best].serves_none

    @cached_property
    def verdict(self) -> Verdict:
        best = self.policies[self.best]
        if self.is_hopeless:
            sentence = f"{self.cluster} cannot serve this within the service level at any rate."
            lowest = best.good_shares[0]
            details = [
                f"Asked for: that {self.level_text}. At {number(float(best.tried_rps[0]))} requests/s it is "
                f"{percent(float(lowest))}: allow more time (slo.ttft_s, slo.tpot_s), or take faster servers."
            ]
            if any(more is not None for more in self.servers.values()):
                details += self._servers_texts()
            return Verdict("worse", sentence, details)
        sentence = f"{self.cluster} serve {number(best.rate_rps)} requests/s in time, routed by {self.best}."
        details = [
            f"In time: {self.level_text}.",
            self._policies_text(),
            *self._ceiling_texts(),
            self._traffic_text(),
            *self._servers_texts(),
        ]
        return Verdict("soft", sentence, details)

    def _policies_text(self) -> str:
        if self.best == self.baseline:
            return f"No policy serves more than {self.baseline}."
        if self.policies[self.baseline].serves_none:
            return f"{self.baseline} serves none in time."
        ratio = self.changes[self.best]
        base = number(self.policies[self.baseline].rate_rps)
        is_more = direction(ratio) > 0 or (math.isnan(ratio.low) and ratio.ratio > CLEAR)
        if not is_more:
            return f"That is not clearly more than {self.baseline} ({base} requests/s)."
        return f"That is {change(ratio)} against {self.baseline} ({base} requests/s)."

    def _ceiling_texts(self) -> list[str]:
        best = self.policies[self.best]
        if not best.is_highest_tried:
            return []
        return [
            f"It is the highest rate tried, at {percent(best.load)} of capacity: what is nearer to it does "
            "not last, as queues grow."
        ]

    def _traffic_text(self) -> str:
        room = self.policies[self.best].rate_rps / self.traffic_rps
        traffic = f"The traffic of {self.name}, {number(self.traffic_rps)} requests/s,"
        if room >= 2:
            return f"{traffic} could be {f'{room:.1f}' if room < 100 else number(room)} times as much."
        if room >= 1:
            return f"{traffic} leaves room for {percent(room - 1)} more."
        return f"{traffic} is more than that: {percent(1 - room)} of it is too much."

    def _servers_texts(self) -> list[str]:
        bought = [
            f"one more {kind} buys {number(gain.ratio)}"
            for kind, gain in self.gains.items()
            if gain.ratio > 0
        ]
        lines = []
        if bought:
            text = listed(bought)
            lines.append(f"{text[0].upper()}{text[1:]} requests/s.")
        found = {kind: more for kind, more in self.servers.items() if more is not None}
        ways = [self._way(kind, more) for kind, more in found.items() if more]
        target = f"For {number(self.target_rps)} requests/s"
        if ways:
            lines.append(f"{target} it takes {', or '.join(ways)}.")
        elif found:
            lines.append(f"{target} it takes the servers that there are; one fewer of any kind is too few.")
        else:
            lines.append(f"{target} more servers of these kinds are not enough.")
        return lines

    def _way(self, kind: str, num_more: int) -> str:
        others = [f"{count} × {one}" for one, count in self.counts.items() if one != kind]
        change_text = f"{abs(num_more)} {'more' if num_more > 0 else 'fewer'}"
        own = [f"{self.counts[kind] + num_more} × {kind} ({change_text})"]
        return " + ".join(own + others) if self.counts[kind] + num_more else f"{' + '.join(others)} alone"

    def notes(self) -> list[str]:
        samples = sample_text(self.config, self.seeds, self.num_samples)
        few = ", which are too few to be reliable" if self.num_samples < MIN_SEEDS else ""
        interval = f"{LEVEL * 100:.0f} % intervals over {samples}{few}"
        texts = [
            f"Goodput: the highest rate of arrivals at which {self.level_text}; {interval}. Every policy "
            f"serves the same requests. More servers are judged with {self.best}.",
        ]
        if self.is_shared:
            texts.append("Prompts share prefixes; capacity is what the servers do with nothing cached.")
        return texts

    # As tables, files and figures ---------------------------------------------------------------------------

    def policy_rows(self) -> list[list[str]]:
        rows = []
        for name, one in self.policies.items():
            text = "baseline" if name == self.baseline else change(self.changes[name])
            if one.serves_none:
                rows.append([name, NONE, "", "", text])
            else:
                rows.append([name, number(one.rate_rps), _interval(one), percent(one.load), text])
        return rows

    def kind_rows(self) -> list[list[str]]:
        rows = []
        for kind, gain in self.gains.items():
            more, now = self.servers[kind], f"{self.counts[kind]} × {kind}"
            needed = "not enough" if more is None else f"{self.counts[kind] + more} ({_signed(more)})"
            if self.one_more[kind].serves_none:
                rows.append([now, NONE, "", needed])
                continue
            rows.append([now, number(gain.ratio), _ends(gain.low, gain.high), needed])
        return rows

    def kind_columns(self) -> list[str]:
        return [*KIND_COLUMNS, f"for {number(self.target_rps)} requests/s"]

    def results(self) -> dict[str, Any]:
        return {
            **provenance(),
            "command": self.command,
            "verdict": vars(self.verdict),
            "warnings": self.warnings,
            "cluster": self.cluster,
            "config": self.config.model_dump(mode="json", exclude={"policy"}),
            "seeds": self.seeds,
            "num_samples": self.num_samples,
            "share": self.share,
            "traffic_rps": self.traffic_rps,
            "interval": {"level": LEVEL, "resamples": NUM_RESAMPLES},
            "best": self.best,
            "policies": {name: _plain(one) for name, one in self.policies.items()},
            "change": {name: vars(ratio) for name, ratio in self.changes.items()},
            "one_more": {
                kind: {"gain_rps": vars(self.gains[kind]), **_plain(one)}
                for kind, one in self.one_more.items()
            },
            "target": {
                "rate_rps": self.target_rps,
                "more": self.servers,
                "count": {
                    kind: None if more is None else self.counts[kind] + more
                    for kind, more in self.servers.items()
                },
            },
        }

    def write(self, folder: Path) -> None:
        write_report(folder, self.results(), self.markdown(), self.html())

    def markdown(self) -> str:
        warned = [f"Warning: {text}." for text in self.warnings]
        parts = [f"`{self.command}`", *self.verdict.lines, *warned, *self.notes()]
        parts.append(markdown(["policy", *POLICY_COLUMNS], self.policy_rows()))
        parts.append(markdown(["servers", *self.kind_columns()], self.kind_rows()))
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        warned = paragraphs([f"Warning: {text}." for text in self.warnings], "warning")
        lead = f"{self.verdict.html()}{warned}<p><code>{unbroken(self.command)}</code></p>"
        lead += paragraphs(self.notes())
        policies = Section(
            "What each policy serves in time",
            table(["policy", *POLICY_COLUMNS], _escaped(self.policy_rows())),
            [*([] if self.is_hopeless else [self._policy_figure()]), self._share_figure()],
        )
        servers = Section(
            "What one more server buys",
            table(["servers", *self.kind_columns()], _escaped(self.kind_rows())),
            [] if self.is_hopeless else [self._kind_figure()],
        )
        return page(f"How much {self.cluster} can take", lead, [policies, servers])

    def _policy_figure(self) -> Figure:
        looks = styles(list(self.policies))
        values = {name: (one.rate_rps, one.low, one.high) for name, one in self.policies.items()}
        return _bars("Goodput", values, {name: looks[name][0] for name in values})

    def _kind_figure(self) -> Figure:
        values = {f"one more {kind}": (gain.ratio, gain.low, gain.high) for kind, gain in self.gains.items()}
        return _bars("Goodput gained", values, dict.fromkeys(values, "#3f7fd0"))

    def _share_figure(self) -> Figure:
        looks = styles(list(self.policies))
        lines = []
        for name, one in self.policies.items():
            shares = [100 * share for share in one.good_shares.tolist()]
            lines.append(Line(name, one.tried_rps.tolist(), shares, *looks[name], has_dots=True))
        # What is hopeless leaves the frame, unless nothing else would be in it.
        lowest = 0.0 if self.is_hopeless else max(0.0, 100 - 6 * 100 * (1 - self.share))
        y = Axis("requests within the service level", lowest, 100.5, _percents(lowest), unit=" %")
        rates = [rate for one in self.policies.values() for rate in one.tried_rps.tolist()]
        x = linear_axis("arrivals, requests/s", rates, "/s")
        asked = Level(100 * self.share, f"{100 * self.share:g} %")
        return Figure("In time at each rate", x, y, [asked, *lines])


def _bars(title: str, values: Mapping[str, tuple[float, float, float]], colours: Mapping[str, str]) -> Figure:
    bars = []
    for row, (name, (value, low, high)) in enumerate(values.items()):
        interval = (low, high) if math.isfinite(low) and math.isfinite(high) else None
        text = f"{name}: {number(value)} requests/s {_ends(low, high)}" if value else f"{name}: {NONE}"
        bars.append(Bar(row, 0.0, value, colours[name], text, interval))
    known = [part for triple in values.values() for part in triple if math.isfinite(part)]
    x = linear_axis("requests/s", [*known, 0.0], "/s", low=min(0.0, *known))
    return Figure(title, x, row_axis(list(values)), bars, height=8 + ROW_HEIGHT * max(len(bars), 1))


def _percents(lowest: float) -> list[tuple[float, str]]:
    return [(value, f"{text} %") for value, text in linear_ticks(lowest, 100)]


def _signed(count: int) -> str:
    return f"{count:+d}".replace("-", "−")


def _interval(one: Goodput) -> str:
    return HIGHEST_TRIED if one.is_highest_tried else _ends(one.low, one.high)


def _ends(low: float, high: float) -> str:
    return f"{number(low)} to {number(high)}" if math.isfinite(low) and math.isfinite(high) else ""


def _plain(one: Goodput) -> dict[str, Any]:
    return {
        "goodput_rps": None if one.serves_none else one.rate_rps,
        "low": None if one.serves_none else one.low,
        "high": None if one.serves_none else one.high,
        "is_highest_tried": one.is_highest_tried,
        "capacity_rps": one.capacity_rps,
        "tried_rps": one.tried_rps,
        "good_shares": one.good_shares,
    }


def _escaped(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[escape(cell) for cell in row] for row in rows]
