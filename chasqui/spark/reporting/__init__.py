"""Events in, numbers and a page out."""
