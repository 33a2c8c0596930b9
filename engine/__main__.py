"""`python -m engine` is the console script `engine`."""

from engine.cli import main

if __name__ == "__main__":
    main()
