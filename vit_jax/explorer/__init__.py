"""The attention explorer: a local page that shows where every layer and head looks.

subject.py opens a model and computes an image once; rows.py is the form in which
attention is kept and sent; server.py answers the page in page/, which saved.py writes
as one file; thumbnails.py has the small pictures of a folder.
"""
