"""What ``benchmarks/delivery.py`` is made of."""
