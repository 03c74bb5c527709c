"""`python -m pergrad`, which is also how torchrun starts it."""

from pergrad.cli import main

if __name__ == "__main__":
    main()
