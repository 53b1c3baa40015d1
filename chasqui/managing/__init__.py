"""Looking after a queue: counts, results, dead jobs, retention, consumers of its group."""
