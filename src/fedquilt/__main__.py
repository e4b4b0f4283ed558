"""`python -m fedquilt` is the command `fedquilt`."""

from fedquilt.cli import main

if __name__ == "__main__":
    main()
