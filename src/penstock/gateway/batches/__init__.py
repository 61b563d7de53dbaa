"""Batches: files of requests that are run on what interactive work leaves free, and whose results are files again."""
