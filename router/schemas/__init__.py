"""Requests and answers as data, with validation of their fields.

Docstrings and field descriptions are shown in `/openapi.json`.
"""
