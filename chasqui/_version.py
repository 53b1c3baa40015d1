"""The version: its one home. Asking the installed metadata for it would double our start-up time."""

VERSION = "0.1.0"
