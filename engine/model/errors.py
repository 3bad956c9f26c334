"""What can go wrong while a model is found."""


class ModelNotFound(Exception):
    """There is no such model here, or it cannot be had; the text is one line for the user."""


class AdapterUnusable(ModelNotFound):
    """There is no such adapter, or it is not one of this model."""
