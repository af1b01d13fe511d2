"""The problem `jobs`: which of the waiting jobs to start on a GPU cluster."""

from pointsman.envs.jobs import JobsSpec, make_env
from pointsman.evaluation.jobs import make_evaluate, make_judge
from pointsman.evaluation.problem import Problem
from pointsman.report.returns_page import appraise

PROBLEM = Problem(JobsSpec, make_env, make_evaluate, make_judge, appraise, preset="jobs", file_preset="jobs")
