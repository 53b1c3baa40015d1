"""The version: its one home. To ask the installed metadata would double our start-up time."""

VERSION = "0.1.0"
