"""A pseudo terminal that runs the `moduli` command, with a size and key presses."""

import errno
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import traceback
import warnings

import torch


class Terminal:
    """The `moduli` command as the session leader of a pseudo terminal, so that Ctrl-C is a key press.

    The command is a fork of this process, because a new one takes seconds to import torch; `fresh` starts `python -m moduli`.
    Builds of torch for accelerators use threads in backward passes, which a fork does not have: with them it is always new.
    """

    def __init__(self, *arguments, cwd, columns=110, fresh=False, **variables):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        environment |= variables
        self.text = ""
        self.child = self.code = None
        if fresh or torch.version.cuda or torch.version.hip:
            words = [sys.executable, "-m", "moduli", *arguments]
            self.child = subprocess.Popen(
                words,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                cwd=cwd,
                env=environment,
                preexec_fn=become_session_leader,
                close_fds=True,
            )
            self.pid = self.child.pid
        else:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # the child does not need the threads of pytest-xdist
                self.pid = os.fork()
            if self.pid == 0:
                run_command(slave, cwd, environment, arguments)
        os.close(slave)

    def read(self, until=None, seconds=600):
        """Read until a text, or a match of a regular expression, appears, or the command ends."""
        pattern = re.compile(re.escape(until)) if isinstance(until, str) else until
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if pattern is not None and pattern.search(self.text):
                return self.text
            if not select.select([self.master], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self.master, 65536)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""
            if not data:
                if pattern is not None and not pattern.search(self.text):
                    raise AssertionError(f"{until!r} did not appear before the end of {self.text[-2000:]!r}")
                return self.text
            self.text += data.decode(errors="replace")
        raise TimeoutError(f"{until!r} did not appear in {self.text[-2000:]!r}")

    def key(self, key):
        os.write(self.master, key)

    def wait(self, seconds=600):
        """Read to the end, and return the exit code."""
        self.read(seconds=seconds)
        return self.reap()

    def reap(self):
        if self.code is None:
            status = os.waitpid(self.pid, 0)[1] if self.child is None else 0
            self.code = os.waitstatus_to_exitcode(status) if self.child is None else self.child.wait()
        return self.code

    def close(self):
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()
        os.close(self.master)


def become_session_leader():
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def run_command(slave, cwd, environment, arguments):
    """Run the command in this forked process, and exit."""
    code = 70
    try:
        for descriptor in (0, 1, 2):
            os.dup2(slave, descriptor)
        become_session_leader()
        os.closerange(3, 256)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["moduli", *arguments]
        sys.stdin, sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(n, mode, closefd=False), "utf-8", write_through=True)
            for n, mode in enumerate(("r", "w", "w"))
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.resetwarnings()
        from moduli.cli import main

        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - shown in the terminal, as Python would
        traceback.print_exc()
    finally:
        os._exit(code)
