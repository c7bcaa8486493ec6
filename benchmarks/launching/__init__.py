"""What ``benchmarks/launch.py`` is made of."""
