"""The errors a user can meet. Each message says what is wrong and what to change, on one line."""

from __future__ import annotations


class JaxinferError(Exception):
    """Base of every error that is a user's to mend; entry points print it and exit without a traceback."""


class ConfigError(JaxinferError):
    """Settings that cannot work together; the message names the numbers that disagree."""


class CheckpointError(JaxinferError):
    """A checkpoint that is missing, truncated, incomplete or of an unknown kind; names the file and tensor."""


class RequestError(JaxinferError):
    """A request that is wrong in itself: HTTP 400, or an error line in a batch job.

    Attributes:
      param: name of the offending request field, or None.
      code: short machine-readable reason such as "context_length_exceeded", or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class OverloadError(JaxinferError):
    """The engine holds as many requests as it may: HTTP 429 or 503; the same request can succeed later."""
