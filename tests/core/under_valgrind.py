"""Every call of test_leaks.py a hundred times, for valgrind to watch; run by test_valgrind.py.

With the argument `leak`, one buffer is leaked instead.
"""

import ctypes
import gc
import sys

from chasqui._core.buffer import CommandBuffer
from tests.core.test_leaks import CALLS, attempt

if "leak" in sys.argv:
    buffer = CommandBuffer()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))
    del buffer
else:
    for name in CALLS:
        work = attempt(name)
        for _ in range(100):
            work()
gc.collect()
print("done", flush=True)
