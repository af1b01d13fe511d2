"""Where requests come from: trace files, arrival processes, length distributions.

`build_workload` turns the `workload:` section of a configuration into flat arrays; everything else here is a
part of it that is useful alone. `readers.py` is apart: it loads polars.
"""

from pointsman.workload.build import build_workload, sample_lengths
from pointsman.workload.spec import WorkloadSpec
from pointsman.workload.workload import Workload

__all__ = ["Workload", "WorkloadSpec", "build_workload", "sample_lengths"]
