"""The figures: a thin layer of drawing on the arrays of the package above."""
