"""The producers and workers that are harmed: chasqui's own, a broken one, and other queues'."""
