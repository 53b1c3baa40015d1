"""The Lua transitions in lua/, and one typed function for each: the door to its script."""
