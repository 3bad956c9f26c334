"""Errors of finding and loading a model."""


class ModelUnavailable(Exception):
    """The model does not exist or cannot be loaded. The text is one line for the user."""


class AdapterUnusable(ModelUnavailable):
    """The adapter does not exist, or is not one of this model."""
