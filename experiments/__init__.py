"""Experiments on LeapQuant states: each module with a ``main`` is run as ``python -m experiments.<name> --help``."""
