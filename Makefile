# make demo: train a policy in under four minutes, and report how it compares with today's routers.   make test: run the tests.
# make demo-serve: the router at work on emulated servers, with a live page, and what it gains, in two minutes.
# All set up their own virtual environment in .venv first.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo demo-serve test lint bench results clean
.DEFAULT_GOAL := demo

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pointsman needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv .venv
	# PyTorch first and by itself: the CPU build of this very version satisfies whatever asks for it later.
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	rm -rf demo
	$(BIN)/pointsman train --preset quick --out demo/run
	$(BIN)/pointsman evaluate demo/run --scenario steady-chat --objective balanced --seeds 8
	$(BIN)/pointsman report demo/run

demo-serve: setup
	$(BIN)/pointsman demo-serve

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/architecture_picture.py --check

bench: setup
	$(BIN)/python benchmarks/simulator_speed.py
	$(BIN)/python benchmarks/simulator_scale.py
	$(BIN)/python benchmarks/training_speed.py
	$(BIN)/python benchmarks/jobs_speed.py
	$(BIN)/python benchmarks/decision_latency.py
	$(BIN)/python benchmarks/router_cost.py

# Every measured table of README and docs anew, and which figures differ; RESULTS="--list", "--page jobs --write", …
results: setup
	$(BIN)/python benchmarks/results.py $(RESULTS)

clean:
	rm -rf .venv demo
