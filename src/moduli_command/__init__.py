"""Where the `moduli` script begins.

`import moduli` imports torch, which takes a second or two. The script imports this module first: by it `moduli` knows that a
command runs, and leaves torch to the commands that need it.
"""

__all__ = ["main"]


def main() -> None:
    """Run the command, as the shell calls it."""
    from moduli.cli import main as run

    run()
