"""A replica at the speed of a device that is not here: all of penstock, but with a model that only takes time.

    python -m tools.drills.paced_replica '{"step_s": 0.03, "max_num_seqs": 16}'

Waiting costs no CPU, so what is measured is the policy, not two cores that everybody shares.
"""

from __future__ import annotations

import json
import signal
import sys
import threading

from tests.server.replica import serving


def main() -> None:
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    with serving(**json.loads(sys.argv[1])) as replica:
        print(f"a paced replica at http://{replica.host}:{replica.port}", flush=True)
        told.wait()


if __name__ == "__main__":
    main()
