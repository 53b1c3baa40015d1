"""Typed tasks: functions that are enqueued like calls, and the app that they belong to."""
