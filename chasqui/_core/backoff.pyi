MAX_DELAY_MS: int

def backoff_ms(
    run: int,
    delay_ms: float,
    *,
    multiplier: float = 1.0,
    max_delay_ms: float | None = None,
    jitter_ms: float = 0,
    luck: float = 0.0,
) -> int: ...
