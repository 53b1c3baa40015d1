"""The events stream: writing it, reading it, waiting for the end of a job."""
