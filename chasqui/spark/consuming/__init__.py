"""Queues as a streaming source: jobs are taken, and acknowledged with their batch."""
