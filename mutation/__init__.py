"""Mutation testing: changes one line at a time and checks whether a test notices.

    make mutants                      # 200 lines, chosen by seed 0
    make mutants SEED=7 ARGS="--count 20"

A test suite that stays green when the code is wrong tests nothing. Each *mutation* is one small change of
one line (`changes`). The tests that run that line, found once by coverage (`witnesses`), run in a process
of their own on a copy of the tree (`trials`). A report lists the mutations that no test noticed (`report`),
with the reason where one is on record in `accepted.toml`.

No package does this as it is. mutmut leaves decorated functions alone, and rules and reductions all are; it
also puts a trampoline around functions whose signatures pergrad reads. cosmic-ray starts an interpreter for
each mutation (8 s to import torch and collect, against 0.3 s by a fork), runs the same tests for all of
them, and drops no statements, arguments or results. mutatest needs a coverage.py of 2020. The changes
themselves are short on Python's own `ast`; coverage.py and pytest-cov tell which test runs which line.
"""
