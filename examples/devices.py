"""A model whose weights, K/V rows and attention are on the devices that the command line names.

python devices.py SmolLM2-135M-Instruct.gguf rpc://127.0.0.1:50052 rpc://127.0.0.1:50053
"""

import sys

import cellkv

path, *names = sys.argv[1:]
try:
    with (
        cellkv.Model.load(path, device=names or None) as model,
        model.new_cache() as cache,  # each layer's rows are where its weights are
        model.executor(cache) as executor,
    ):
        print("layers on", model.info.devices)
        tokens = model.tokenizer.encode("The capital of Norway is").tolist()
        seq = cache.open()
        for _ in range(3):
            logits = executor.run(tokens, seq)[0]
            tokens = [int(logits.argmax())]
            print(model.tokenizer.decode(tokens))
except (cellkv.UnknownDeviceError, cellkv.NetworkError, cellkv.UnsupportedError) as error:
    sys.exit(f"{error}\ndevices of this machine: {', '.join(cellkv.devices())}")
