"""What a cell needs of the notebook, and what it changed: found, packed, followed, and brought home in place."""
