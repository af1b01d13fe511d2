"""The problems that come with the package, one a module. How they are found: evaluation/problem.py."""
