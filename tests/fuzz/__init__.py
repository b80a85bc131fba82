"""Fuzzing of all that strangers can send: files, texts, states, command lines.

    make fuzz                                     # every target, 60 seconds each
    make fuzz ARGS="--target header --cases 100000 --seed 7"
    make fuzz ARGS="--target header --engine atheris"   # guided by coverage, where atheris installs

Cases are made of random numbers, by strategies of Hypothesis, and tried in child processes with bounded memory. A
signal, a case of more than five seconds, an exception outside of `llamacli.errors`, one that blames a plugin, and
growing memory are findings; their cases are kept.
"""
