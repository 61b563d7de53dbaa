"""The public door: who may enter, to which replica, and the bytes there and back."""
