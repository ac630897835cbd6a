"""`python -m mainstem` is the command `mainstem`."""

from mainstem.cli import main

if __name__ == "__main__":
    main()
