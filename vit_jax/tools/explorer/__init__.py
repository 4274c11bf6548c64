"""The attention explorer: a local web page with the attention of every layer and head.

session.py runs each model once per image and keeps its attention. server.py answers the
requests of the page in page/. saved.py writes that page with one image as a single
file. images.py reads the images of a folder and makes their thumbnails.
"""
