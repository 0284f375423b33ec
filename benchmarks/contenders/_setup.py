"""Imported first by every contender: one thread per process, and ``workload`` where children find it.

BLAS and OpenMP read their thread counts when NumPy and torch are imported, and the peers' worker processes
inherit the environment, so both are set here and not in ``workload``.
"""

import os
import sys
from pathlib import Path

_BENCHMARKS = str(Path(__file__).resolve().parents[1])

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"
sys.path.insert(0, _BENCHMARKS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_BENCHMARKS, os.environ.get("PYTHONPATH"))))
