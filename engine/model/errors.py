"""Errors of finding and loading a model."""


class ModelUnavailable(Exception):
    """The model does not exist or cannot be loaded. The text is one line for the user."""

    flag = "--model"
    """The one that named it, if the text names none."""

    def with_flag(self) -> str:
        text = str(self)
        return text if text.startswith("--") else f"{self.flag}: {text}"


class AdapterUnusable(ModelUnavailable):
    """The adapter does not exist, or is not one of this model."""

    flag = "--adapter-path"
