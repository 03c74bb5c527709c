"""Times pergrad and its peers on the same models in one process.

- ``benchmarks.run`` times every method on every model. To stay below ten minutes on a GPU, run one model per
  call, as in ``--size gpu --precision bf16 --models vit``; ``--checks timed`` skips compiling in float64.
- ``benchmarks.table`` and ``benchmarks.plot`` render the stored rows as markdown and as charts.
- ``benchmarks.targets`` compares the stored rows with the goals and with the best peer.
- ``benchmarks.scaling`` and ``benchmarks.switches`` measure growth with batch, length and width.

``pip install backpack-for-pytorch`` adds BackPACK, which needs the torchvision that matches torch. A peer
that is not installed is shown as such.
"""
