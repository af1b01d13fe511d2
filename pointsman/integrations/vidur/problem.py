"""The problem `vidur`: which replica runs a request, in Vidur's simulator."""

import logging

from pointsman.evaluation.problem import Problem
from pointsman.integrations.vidur.environment import make_env
from pointsman.integrations.vidur.judging import make_evaluate, make_judge
from pointsman.integrations.vidur.spec import VidurSpec
from pointsman.report.returns_page import appraise

logging.getLogger("vidur").setLevel(logging.WARNING)  # it writes to stdout, several lines an episode

PROBLEM = Problem(
    VidurSpec, make_env, make_evaluate, make_judge, appraise, preset="vidur", file_preset="vidur"
)
