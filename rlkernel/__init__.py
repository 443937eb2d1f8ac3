"""rlkernel: three questions about distributed GPU kernels, answered with evidence.

Same bits? Which sum is missing? Is communication hidden?

Every answer takes the same way through this package:

    parameters -> cases -> torchrun worker -> rows of a record -> notebook -> figure, verdict

Where things live, from the ground up; a line may use the lines above it, never those below:

    grid, contract, compare          which rank is who, the order of additions, what differs
    kernels                          Triton, each with its plain-torch twin
    collectives                      every byte between ranks, at a named site
    ffn, overlap, reconstruct        the blocks that are measured
    audit, plugin, experiments       the questions asked of them
    run                              launch real processes, wait, clean up, write down

Beside that ladder: records (the folders on disk; standard library only), figures (a record drawn)
and pages (notebooks to HTML). None of the three imports torch.

    python -m rlkernel --help        the one command line

Importing this package imports nothing else.
"""

__version__ = "0.1.0"
