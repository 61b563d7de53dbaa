from tests.seeded import seeded

__all__ = ["seeded"]  # the fixture
