"""penstock: LLM serving, from the GPU up to the fleet."""

__version__ = "0.1.0"
