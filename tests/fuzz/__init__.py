"""Broken input for the core under the address and undefined-behaviour sanitizers."""
