"""Errors in finding and loading a model."""


class ModelUnavailable(Exception):
    """The model does not exist or cannot be loaded. The message is one line for the user."""

    flag = "--model"
    """The flag that named it, if the message names none."""

    def with_flag(self) -> str:
        text = str(self)
        return text if text.startswith("--") else f"{self.flag}: {text}"


class NotNow(ModelUnavailable):
    """The model cannot be downloaded now, which may pass."""


class AdapterUnusable(ModelUnavailable):
    """The adapter does not exist, or does not belong to this model."""

    flag = "--adapter-path"


class FilesChanged(Exception):
    """A model file was modified while the model is served: nothing can be computed any more."""
