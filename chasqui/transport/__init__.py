"""Requests, links and connections: how commands reach the server and replies come back."""
