"""`python -m tests.abuse.burner SHARE`: burns this share of a core until its input ends."""

from __future__ import annotations

import sys
import threading
import time

_PERIOD_S = 0.01


def main() -> None:
    share = float(sys.argv[1])
    print("READY", flush=True)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.is_set():
        began_at, burnt_s = time.monotonic(), time.process_time()
        while time.process_time() - burnt_s < share * _PERIOD_S and not over.is_set():
            pass
        time.sleep(max(0.0, began_at + _PERIOD_S - time.monotonic()))


if __name__ == "__main__":
    main()
