"""Tables read as they are, in batches or as a stream. Nothing is taken from a queue."""
