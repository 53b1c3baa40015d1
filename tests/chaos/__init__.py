"""Chaos: real producers, workers and a server under a seeded schedule of faults, then judged.

`python -m tests.chaos` runs it; see docs/reliability.md for what it says and what it found.
"""
