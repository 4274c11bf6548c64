"""Finds records of one data set that are near-duplicates of records of another."""
