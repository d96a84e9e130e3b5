"""A real terminal for a command: a pseudo terminal, with its size and its keys."""

import errno
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time


class Terminal:
    """Runs `python -m moduli` in a terminal of its own; Ctrl-C is a key."""

    def __init__(self, *arguments, cwd, columns=110):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)

        def own():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "moduli", *arguments], stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=environment,
            preexec_fn=own, close_fds=True,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def read(self, until=None, seconds=60):
        """Read until a text appears, or the command ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if until is not None and until in self.text:
                return self.text
            if not select.select([self.master], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self.master, 65536)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                return self.text
            if not data:
                return self.text
            self.text += data.decode(errors="replace")
        raise TimeoutError(f"{until!r} did not appear in {self.text[-2000:]!r}")

    def key(self, key):
        os.write(self.master, key)

    def wait(self, seconds=60):
        self.read(seconds=seconds)
        return self.process.wait(seconds)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
