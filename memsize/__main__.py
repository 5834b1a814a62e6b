"""`python -m memsize` is `memsize`."""

from memsize.cli import main

if __name__ == "__main__":
    main()
