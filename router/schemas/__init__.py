"""Requests and answers as data, with the checks of their fields."""
