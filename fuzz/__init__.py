"""Fuzzing: runs random programs and compares every gradient with a plain loop over the samples.

    make fuzz                         # 1,000 programs whose samples do not meet, chosen by seed 0
    make fuzz SEED=7 N=20000 WORKERS=16
    make fuzz ARGS="--mixing"         # programs with one function that mixes the samples

A program is data: sizes, and a list of steps, each the name of an *ingredient* and a seed. An ingredient is a
few lines of a model (`ingredients`), which may call `functions`. `programs` draws programs and writes their
source; `judge` runs them plainly and by pergrad, and `comparing`
compares; `processes` does so in forked processes, since a program may
end one. Failing programs lose one step at a time while they still fail (`shrinking`), and are printed as
scripts (`reproduction`). `report` counts.

Each answer is *exact* or *refused* (a `PergradError`), or it is a failure: *wrong*, a *crash*, a changed
*state* of the model or the generator of random numbers, a *poisoned* cache, or a certificate that passes a
wrong answer (*certified*) or rejects a right one (*alarm*).
"""
