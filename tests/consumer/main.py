"""Uses the package from outside the source tree: opens a sequence, places a step."""

import cellkv

with cellkv.Cache(backend="cells", capacity=4) as cache:
    seq = cache.open()
    cache.declare([seq, seq])
    cache.place()
    if cache.length(seq) != 2:
        raise SystemExit(f"placed 2 tokens, the sequence owns {cache.length(seq)} cells")
print(f"Python: cellkv {cellkv.__version__} from {cellkv.__file__}")
