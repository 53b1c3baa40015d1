"""Measurements, each with the command that repeats it: see README.md."""
