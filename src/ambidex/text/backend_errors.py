"""What the `tokenizers` library raises: plain exceptions, and panics of the Rust code below it."""


def is_backend_error(error: BaseException) -> bool:
    """Whether this is a failure of the library, and not the user's interrupt or the process's exit.

    A panic derives from BaseException alone, and its class cannot be imported: it is known by its name.
    """
    kind = type(error)
    return isinstance(error, Exception) or (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")
