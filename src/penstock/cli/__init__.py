"""The composition root: parse, build the objects, start. It knows everyone; nobody knows it."""
