"""Times pergrad and its peers on the same models in one process.

- ``benchmarks.run``: every method on every model; on a GPU a model a call keeps to ten minutes, as in
  ``--size gpu --precision bf16 --models vit``, and ``--checks timed`` saves the compilation in float64
- ``benchmarks.table``, ``benchmarks.plot``: the stored rows as markdown and as pictures
- ``benchmarks.targets``: the stored rows against the goals, and against the best peer
- ``benchmarks.scaling``, ``benchmarks.switches``: growth with batch, length and width, and what bends it

``pip install backpack-for-pytorch`` adds BackPACK, which needs the torchvision that matches torch; a peer
that is not installed is shown as such.
"""
