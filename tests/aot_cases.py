"""Representative calls of the launchers, which aot.py compiles for each target, and what their kernels have to show.

A case is two lines: its name and call, and the needs of its kernels. Tensors are empty: only shapes, dtypes and strides
count, and empty memory is never touched.
"""

from aot import Case  # noqa: F401

CASES = {}
