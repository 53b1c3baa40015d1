"""Worker processes: signals, health, supervision."""
