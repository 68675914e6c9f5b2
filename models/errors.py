"""The errors that a model directory or file can raise. Each message says what was found and what is supported.

Knows nothing else of the package.

    ModelError                what the user pointed at cannot be served
      UnsupportedModelError   well-formed, but of an architecture or with a setting that is not supported
      CheckpointError         a file or a tensor is missing, surplus, misshapen or damaged
"""


class ModelError(Exception):
    """The model cannot be loaded; the message is meant for the person who named it."""


class UnsupportedModelError(ModelError):
    """The model is of an architecture, or asks for a setting, that is not supported."""


class CheckpointError(ModelError):
    """The files of the model are incomplete, damaged or contradict its configuration."""
