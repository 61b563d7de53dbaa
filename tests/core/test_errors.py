import penstock.core.errors as errors


def test_codes_are_unique_and_every_class_is_in_the_drawn_tree() -> None:
    found = errors.all_errors()
    assert len({error.code for error in found}) == len(found)
    assert errors.__doc__ is not None
    for error in found:
        assert error.__name__ in errors.__doc__
