from ambidex.core.errors import CallerError, ContextLengthError, InternalError, MachineError, ShapeError, TierFullError


def test_context_length_error_carries_and_names_both_counts() -> None:
    error = ContextLengthError(900, 512)
    assert (error.num_prompt_tokens, error.limit) == (900, 512)
    assert "900 tokens" in str(error)
    assert "512 tokens" in str(error)
    assert isinstance(error, CallerError)


def test_errors_are_ordered_by_who_caused_them() -> None:
    assert issubclass(TierFullError, MachineError)
    assert issubclass(ShapeError, InternalError)
    assert not issubclass(InternalError, CallerError | MachineError)
