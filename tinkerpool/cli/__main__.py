"""`python -m tinkerpool.cli` is `tinkerpool`."""

from tinkerpool.cli.main import main

if __name__ == "__main__":
    main()
