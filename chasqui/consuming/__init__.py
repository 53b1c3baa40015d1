"""The worker's engine: reading entries, running handlers, settling jobs."""
