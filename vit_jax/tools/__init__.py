"""Jobs around the library, each in a folder of its own; the library imports none."""
