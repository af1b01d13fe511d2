"""The problem `routing`: which replica runs a request, in our simulator."""

from pointsman.envs.routing import RoutingSpec, make_env
from pointsman.evaluation.problem import Problem
from pointsman.evaluation.routing import choose_start, make_evaluate, settle
from pointsman.report.routing import appraise

PROBLEM = Problem(
    RoutingSpec,
    make_env,
    make_evaluate,
    appraise=appraise,
    settle=settle,
    choose_start=choose_start,
    preset="quick",
)
