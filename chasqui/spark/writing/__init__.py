"""Rows added as jobs, exactly once where that is asked for."""
