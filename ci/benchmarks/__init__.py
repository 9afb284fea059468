"""The attention benchmark: portable's kernels and their peers, side by side in one run.

    python ci/bench.py attention --stage .gpu/peers             the peers of PyPI's wheels, into a folder
    python ci/bench.py attention --peers .gpu/peers --out FILE  the run, on a GPU; --only d1,ragged for some sections
    python ci/bench.py attention --table FILE                   the rows of a result, beside what they must reach

`rows` says what is measured and what it must reach, `sections` runs it, `timing` times it, `subjects` and `peers` are
those that take part. Nothing of a peer is kept here: what is not staged or installed is left out, with a message.
"""
