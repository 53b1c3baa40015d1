"""Values: keys, jobs, settings, payloads. Each is checked when it is made."""
