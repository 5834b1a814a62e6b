"""The command `memsize`, and `python -m memsize`."""

from memsize.interrupt import ends_the_process


def main() -> None:
    """Run `memsize` with the process's own arguments and exit."""
    ends_the_process()
    from memsize.cli import main as run_and_exit

    run_and_exit()


if __name__ == "__main__":
    main()
