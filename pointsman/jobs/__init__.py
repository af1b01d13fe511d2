"""GPU job scheduling: which of the waiting jobs to start on a cluster of GPUs, or none; docs/jobs.md.

The second problem that the same trainer learns on (envs/jobs.py), simulated in machine code like the first.
"""
