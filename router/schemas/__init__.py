"""Requests and answers as data, with the checks of their fields.

Docstrings and descriptions of fields are shown in `/openapi.json`.
"""
