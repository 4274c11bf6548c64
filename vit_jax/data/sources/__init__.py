"""Data sets: a file for each kind; open.py opens them."""
