"""Adding jobs: their options, chunks that are applied once, coalesced and durable adds."""
