import os

from hypothesis import settings

# Tiny shapes gain nothing from a second torch thread, and on a busy machine every operation would wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("no deadline", deadline=None)  # examples are slow when the machine is busy
settings.load_profile("no deadline")
