"""Tests; a regular package, so that a `tests` folder which another library installs does not shadow it."""
