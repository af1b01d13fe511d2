"""What is made of what the rules find: order, clean bill, what could not be judged, JSON, sparklines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pointsman.diagnosis.curves import RunLog
from pointsman.diagnosis.findings import Diagnosis, diagnose, sparkline
from pointsman.diagnosis.rule import Evidence, Looked, Margin, Rule, Severity, Unclear
from pointsman.errors import InputError
from pointsman.plain import to_json

from .made import foreign, healthy, make


def rule(name: str, looked: Looked, **settings: Any) -> Rule:
    return Rule(
        name, name, settings.pop("needs", ("entropy",)), lambda log: looked, "cause", "check", **settings
    )


def evidence(severity: Severity) -> Evidence:
    return Evidence(severity, "text", {"figure": 1.0}, "entropy", 3.0)


def test_the_worst_comes_first_and_then_the_order_of_the_rules() -> None:
    rules = [
        rule("a", evidence("note")),
        rule("b", evidence("bad")),
        rule("c", evidence("warning")),
        rule("d", evidence("bad")),
    ]
    diagnosis = diagnose(make(healthy()), rules)
    assert [one.name for one in diagnosis.findings] == ["b", "d", "c", "a"]
    assert not diagnosis.is_clean
    assert diagnose(make(healthy()), rules[:1]).is_clean


def test_a_rule_that_cannot_be_asked_says_why() -> None:
    rules = [
        rule("here", Margin("entropy", 0.05, 0.1)),
        rule("beyond", Margin("entropy", 0.5, 0.1)),
        rule("column", None, needs=("nothing|none", "entropy")),
        rule("rows", None, min_rows=1000),
        rule("early", None, from_fraction=0.999),
        rule("group", None, needs=("nowhere/*",)),
        rule("score", None, needs=("score",)),
    ]
    log = foreign({name: healthy()[name] for name in ("update", "entropy", "fraction_done")})
    why = {one.name: one.why for one in diagnose(log, rules).not_judged}
    assert why == {
        "column": "no nothing or none",
        "rows": "120 rows, needs 1000",
        "early": "too early: 99 % of the run",
        "group": "no nowhere/*",
        "score": "no score",
        "beyond": "no proof, but entropy: 0.5, trouble at > 0.1",
    }
    assert [margin.value for margin in diagnose(log, rules).margins] == [0.05]


@pytest.mark.parametrize(
    ("names", "verdict", "text"),
    [
        (tuple(healthy(rows=8)), "clean", "nothing went wrong, as far as"),
        (("update", "approx_kl_mean", "lr"), "unclear", "it does not tell how good the policy is"),
        (("update", "entropy_frac", "approx_kl_mean", "v_loss"), "unclear", "how good the policy is"),
        (("update", "eval_mean_return", "lr"), "unclear", "how large its updates are, how much it explores"),
        (("update", "mean_ep_return", "entropy_frac", "approx_kl_mean"), "clean", "nothing went wrong"),
    ],
)
def test_a_log_that_tells_little_gets_no_clean_bill(names: tuple[str, ...], verdict: str, text: str) -> None:
    diagnosis = diagnose(foreign({name: healthy()[name] for name in names}))
    assert diagnosis.verdict == verdict
    assert text in diagnosis.verdict_text
    assert f"{diagnosis.num_judged} of {diagnosis.num_rules} rules" in diagnosis.verdict_text
    assert diagnosis.num_judged + len(diagnosis.not_judged) == diagnosis.num_rules
    assert diagnosis.is_clean == (verdict == "clean")


def test_a_rule_that_has_its_columns_and_still_cannot_tell_counts_as_not_judged() -> None:
    diagnosis = diagnose(make(healthy()), [rule("a", Unclear("too few of a kind")), rule("b", None)])
    assert [(one.name, one.why) for one in diagnosis.not_judged] == [("a", "too few of a kind")]
    assert (diagnosis.num_judged, diagnosis.num_rules) == (1, 2)


def test_a_rule_that_stumbles_costs_no_other_finding() -> None:
    def stumble(log: RunLog) -> Looked:
        raise ZeroDivisionError("by a log nobody thought of")

    broken = replace(rule("broken", None), look=stumble)
    diagnosis = diagnose(make(healthy()), [broken, rule("fine", evidence("bad"))])
    assert [one.name for one in diagnosis.findings] == ["fine"]
    assert diagnosis.not_judged[0].why == "ZeroDivisionError: by a log nobody thought of"


def test_json_is_plain() -> None:
    columns = healthy()
    columns["entropy"][:] = np.nan
    diagnosis = diagnose(make(columns), [rule("a", evidence("bad"), needs=("update",))])
    plain = json.loads(to_json(diagnosis.to_dict()))
    (finding,) = plain["findings"]
    assert finding["figures"] == {"figure": 1.0}
    assert set(plain) == set(Diagnosis.__dataclass_fields__) | {"is_clean", "num_judged", "verdict"}


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"update": np.ones(1), "entropy": np.ones(1)}, "has 1 row: too few"),
        ({"update": np.arange(9.0), "apples": np.arange(9.0)}, "no column with numbers that a rule knows"),
        (
            {"update": np.arange(9.0), "entropy": np.full(9, np.nan)},
            "no column with numbers that a rule knows",
        ),
    ],
)
def test_a_log_that_says_nothing_is_refused(columns: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        diagnose(foreign(columns))


def test_one_row_is_enough_for_a_mask() -> None:
    diagnosis = diagnose(foreign({"update": np.ones(1), "invalid_frac": np.full(1, 0.2)}))
    assert [one.name for one in diagnosis.findings] == ["mask-bug"]


def test_sparklines() -> None:
    assert sparkline(np.arange(8.0)) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.full(5, 3.0)) == "▄▄▄▄▄"
    assert sparkline(np.empty(0)) == ""
    assert len(sparkline(np.arange(1000.0))) == 32
    spike = np.append(np.linspace(0.0, 1.0, 31), -1e9)
    assert len(set(sparkline(spike))) > 3  # what is far off does not flatten the rest
