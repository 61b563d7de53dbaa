from tests.interpreter import quick_interpreter

__all__ = ["quick_interpreter"]  # the fixture
