"""Nothing here is for Python callers: typed.pyx builds on it."""
