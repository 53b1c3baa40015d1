"""Archives of events and of finished jobs, kept once each."""
