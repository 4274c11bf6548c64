"""Records of one data set that show the same picture as records of another.

thumbnails -> hashing -> search (candidates) -> alignment (proof) -> scan -> outputs.
"""
