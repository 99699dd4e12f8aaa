"""Fails if `import trl` loads torch or takes 0.3 s or more (best of five fresh interpreters)."""

import subprocess
import sys

LIMIT = 0.3  # seconds
PROBE = """
import sys, time
start = time.perf_counter()
import trl
elapsed = time.perf_counter() - start
heavy = [name for name in ("torch", "transformers", "datasets", "numpy") if name in sys.modules]
print(elapsed, *heavy)
"""


def probe() -> tuple[float, list[str]]:
    """Seconds that `import trl` took in a fresh interpreter, and the heavy packages it loaded."""
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    elapsed, *heavy = run.stdout.split()
    return float(elapsed), heavy


def main() -> None:
    runs = [probe() for _ in range(5)]
    best = min(elapsed for elapsed, _ in runs)
    heavy = runs[0][1]
    if heavy or best >= LIMIT:
        sys.exit(f"import trl took {best:.3f} s (limit {LIMIT} s) and loaded {heavy or 'nothing heavy'}.")
    print(f"import trl: {best:.3f} s, nothing heavy loaded")


if __name__ == "__main__":
    main()
