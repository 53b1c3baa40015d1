"""chasqui beside other programs. Each module is for the one that gives it its name."""
