"""The problem `live`: which replica runs a request, on live servers."""

from pointsman.evaluation.problem import Problem
from pointsman.live.cluster import session
from pointsman.live.environment import make_env, make_evaluate
from pointsman.live.spec import LiveSpec

PROBLEM = Problem(LiveSpec, make_env, make_evaluate, session=session, preset="live", file_preset="live")
