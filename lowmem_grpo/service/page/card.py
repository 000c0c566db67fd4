"""How busy the cards of this machine are, as their driver says it."""

import shutil
import subprocess
import time
from threading import Lock

from lowmem_grpo.units import MIB, size_text

QUERY = "name,utilization.gpu,memory.used,memory.total"
KEEP = 3.0  # seconds for which an answer is taken as it was
WAITS = 5.0  # seconds for the driver


class CardUse:
    """Asks `nvidia-smi`, and not more often than it makes sense. Without it nothing is said."""

    def __init__(self, command: str | None = None) -> None:
        self.command = shutil.which("nvidia-smi") if command is None else command
        self.lock, self.asked, self.said = Lock(), float("-inf"), list[str]()

    def words(self) -> list[str]:
        with self.lock:
            if self.command is not None and time.monotonic() - self.asked > KEEP:
                self.said = [card_text(line) for line in self.lines(self.command) if line.count(",") >= 3]
                self.asked = time.monotonic()
            return self.said

    def lines(self, command: str) -> list[str]:
        """Return the lines that the driver's program prints; none if it fails."""
        try:
            process = subprocess.run([command, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
                                     timeout=WAITS, capture_output=True, text=True, check=True)
        except (OSError, subprocess.SubprocessError):
            self.command = None  # it will not work the next time either
            return []
        return process.stdout.splitlines()


def card_text(line: str) -> str:
    """A card's line in words; what the driver does not know is left out."""
    name, busy, used, total = (part.strip() for part in line.rsplit(",", 3))
    said = [f"{busy}% busy"] if busy.isdigit() else []
    if used.isdigit() and total.isdigit():
        said.append(f"{size_text(int(used) * MIB)} of {size_text(int(total) * MIB)} in use")
    return f"{name}: {', '.join(said) or 'its driver says nothing'}"
