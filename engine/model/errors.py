"""What can go wrong while a model is found."""


class ModelUnavailable(Exception):
    """There is no such model here, or it cannot be had; the text is one line for the user."""


class AdapterUnusable(ModelUnavailable):
    """There is no such adapter, or it is not one of this model."""
