"""Delayed and repeatable jobs: one leader promotes and fires them for all workers."""
