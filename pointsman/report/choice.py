"""Which policy to take: the sentence that a comparison begins with.

The best policy is the one whose requests cost least among those that a router can have, where what is beyond
the objective's limits on tails counts as cost, several times (experiments/objective.py): as in training and
`tune`. Better is only what the 95 % interval leaves no doubt about. A policy that is clearly shorter on
average and pays for it with a tail is named beside the best: whether that is worth it is for the user to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pointsman.evaluation.bootstrap import LEVEL, MIN_SEEDS, Ratio
from pointsman.evaluation.compare import HEADLINES, Comparison, cost_ratio, geometric_mean
from pointsman.experiments.objective import DEFAULT_OBJECTIVE, Objective, find_objective
from pointsman.report.appraisal import BETTER, UNCLEAR, Verdict
from pointsman.report.tables import direction, listed, samples_text
from pointsman.report.verdict import changes_text, judged_text, standing

LIGHT_LOAD = 0.3  # of capacity
ALIKE = 0.01  # of the cost: less than that between two policies is nothing to choose by


def choice_of(
    comparisons: Sequence[Comparison], ratios: dict[str, dict[str, Ratio]], asked: Objective | None
) -> tuple[str, Verdict]:
    """The best policy and the verdict. `ratios` to the baseline by policy and headline, over all comparisons.

    Costs are those of the objective asked for, or of the usual one.
    """
    objective = asked or find_objective(DEFAULT_OBJECTIVE)
    baseline = comparisons[0].baseline
    # The baseline first: where another is exactly as good, there is no reason to change.
    possible = [baseline]
    possible += [
        name for name in ratios if name != baseline and not any(one.is_oracle(name) for one in comparisons)
    ]
    costs = {name: cost_ratio(comparisons, objective, name, baseline) for name in possible}
    penalties = {name: _penalty(comparisons, objective, name) for name in possible}
    best = min(possible, key=lambda name: _or_last(math.log(costs[name].ratio)) + penalties[name])
    others = {name: cost_ratio(comparisons, objective, name, best) for name in possible if name != best}
    alike = [
        name for name, ratio in others.items() if _is_alike(ratio) and penalties[name] <= penalties[best]
    ]
    details = [f"Just as good, within 1 % or the interval: {listed(alike)}."] if alike else []
    details += _shorter(comparisons, best, [name for name in others if name not in alike])
    details += judged_text(comparisons)
    loads = [one.setting.load for one in comparisons if one.setting is not None]
    if (
        direction(costs[best]) > -1
        and loads
        and all(load is not None and load < LIGHT_LOAD for load in loads)
    ):
        details.append(
            "That is a light load, which may leave nothing to gain; raise the load in the file to try more."
        )
    details.append(_basis(comparisons, objective))
    return best, Verdict(*_verdict(best, baseline, ratios[best], costs[best], alike), details)


def _verdict(
    best: str, baseline: str, ratios: dict[str, Ratio], cost: Ratio, alike: Sequence[str]
) -> tuple[str, str]:
    """Tone and sentence."""
    if best == baseline:
        return UNCLEAR, f"No policy here is better than {baseline}."
    found = standing(ratios, list(ratios))
    if math.isnan(cost.low):
        return UNCLEAR, (
            f"One run cannot tell how sure it is: {best} looks best, {changes_text(ratios)} "
            f"against {baseline}."
        )
    if direction(cost) > -1:
        return UNCLEAR, (
            f"No policy is clearly better than {baseline}: {best} comes nearest, {changes_text(ratios)}."
        )
    sentence = f"{best} serves this traffic best: {changes_text(found.better)} against {baseline}"
    if found.worse:
        sentence += f", but worse {changes_text(found.worse)}"
    unclear = f" No clear difference in {changes_text(found.unclear)}." if found.unclear else ""
    return BETTER if not found.worse else UNCLEAR, f"{sentence}.{unclear}"


def _penalty(comparisons: Sequence[Comparison], objective: Objective, name: str) -> float:
    """The penalty for exceeding limits. A limit that names a policy which was not compared is not judged."""
    breaches = {}
    for limit in objective.limits:
        metric, reference = f"{limit.metric}_s", limit.policy
        if limit.seconds is not None:
            values = [float(one.metrics[name][metric].mean()) for one in comparisons]
            breaches[limit.metric] = np.array([limit.breach(value, value) for value in values])
        elif all(reference in one.names for one in comparisons):
            ratio = geometric_mean(comparisons, [metric], name, reference)[0].ratio
            breaches[limit.metric] = np.array([limit.breach(ratio, 1.0)])
    return objective.penalty(breaches)


def _shorter(comparisons: Sequence[Comparison], best: str, names: Sequence[str]) -> list[str]:
    """The policy with the clearly shortest mean, if it is not the best, and what it costs."""
    found = {name: geometric_mean(comparisons, list(HEADLINES), name, best) for name in names}
    at = HEADLINES.index("e2e_mean_s")
    shorter = {name: row for name, row in found.items() if row[at].high < 1.0 - ALIKE}
    if not shorter:
        return []
    name = min(shorter, key=lambda one: shorter[one][at].ratio)
    ratios = dict(zip(HEADLINES, shorter[name], strict=True))
    return [f"If the mean is all that counts, take {name}: {changes_text(ratios)} against {best}."]


def _is_alike(cost: Ratio) -> bool:
    """Whether there is nothing to choose by; without an interval, only if the costs are the same."""
    return cost.ratio < 1 + ALIKE or (not math.isnan(cost.low) and direction(cost) < 1)


def _or_last(ratio: float) -> float:
    return math.inf if math.isnan(ratio) else ratio


def _basis(comparisons: Sequence[Comparison], objective: Objective) -> str:
    fewest = min(one.num_samples for one in comparisons)
    few = ", which are too few to be reliable" if fewest < MIN_SEEDS else ""
    told = f"in brackets {LEVEL * 100:.0f} % intervals over {samples_text(comparisons)}{few}"
    if fewest < 2:
        told = f"for intervals, use at least {MIN_SEEDS} seeds (--seeds) or a longer trace"
    kept = f", with {listed([limit.text for limit in objective.limits])}" if objective.limits else ""
    return f"The best policy has the lowest cost of a request, {objective.formula}{kept}; {told}."
