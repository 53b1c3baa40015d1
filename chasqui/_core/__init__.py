"""The compiled core: commands into bytes, bytes into replies and entries.

No I/O, no clock, no policy.
"""
