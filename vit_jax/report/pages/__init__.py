"""Reports: what runs gave beside the numbers of the paper, as HTML and Markdown."""
