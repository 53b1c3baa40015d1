"""Every error that chasqui raises on its own account, in one shallow tree."""


class ChasquiError(Exception):
    """The base of all errors that chasqui raises."""


class EmbeddedServerError(ChasquiError):
    """The embedded server could not be found, started or reached."""
