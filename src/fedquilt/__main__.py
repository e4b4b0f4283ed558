"""`python -m fedquilt` is the command `fedquilt`."""

from fedquilt.cli import program

if __name__ == "__main__":
    program()
