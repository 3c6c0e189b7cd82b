"""`python -m cellkv`: a demo, what this installation consists of, a server that lends a device."""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
from collections.abc import Sequence

import cellkv

from . import _lib
from ._arguments import as_int, as_text

NO_RPC = """\
Build a ggml that has it, for this environment:
    pip install --force-reinstall --no-deps --no-cache-dir --no-binary libggml-python \\
        -C cmake.define.GGML_RPC=ON libggml-python==0.20.2.post1"""

REMOTE = """\
cellkv: WARNING: the protocol has no authentication and no encryption. Whoever can reach {} can
read and write all that this server holds, and end it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal cannot write
    try:
        return int(options.command(options))
    except cellkv.CellkvError as error:
        print(f"cellkv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cellkv", description=cellkv.__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="eight questions to one model, answered together")
    demo.add_argument("--model", metavar="PATH", help="a GGUF chat model; default SmolLM2-135M")
    demo.add_argument("--plain", action="store_true", help="lines instead of panels")
    demo.add_argument("--max-tokens", type=_positive, default=96, metavar="N", help="per answer")
    demo.add_argument("--threads", type=int, default=0, metavar="N", help="default: one per core")
    demo.set_defaults(command=_demo)

    info = commands.add_parser("info", help="version, library and devices")
    info.set_defaults(command=_info)

    server = commands.add_parser(
        "rpc-server", help="lend a device of this machine over the network"
    )
    server.add_argument("--host", default="127.0.0.1", help="IPv4 address; default 127.0.0.1")
    server.add_argument("--port", type=int, default=50052, metavar="N", help="default 50052")
    server.add_argument("--device", metavar="NAME", help="default the best one")
    server.add_argument("--threads", type=int, default=0, metavar="N", help="default: one per core")
    server.add_argument(
        "--allow-remote", action="store_true", help="listen on an address that others can reach"
    )
    server.set_defaults(command=_rpc_server)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _demo(options: argparse.Namespace) -> int:
    from . import demo

    path = options.model or demo.find_smollm2()
    if path is None:
        print(demo.NO_MODEL, file=sys.stderr)
        return 1
    screen = demo.make_screen(plain=options.plain)
    demo.run(path, screen, max_tokens=options.max_tokens, n_threads=options.threads)
    return 0


def _info(_options: argparse.Namespace) -> int:
    print(f"cellkv {cellkv.__version__}")
    print(f"library: {_lib.lib.path}")
    print(f"devices: {', '.join(cellkv.devices())}")
    return 0


def _rpc_server(options: argparse.Namespace) -> int:
    config = _lib.lib.cellkv_rpc_server_config_default()
    config.host = as_text(options.host, "host")
    config.port = as_int(options.port, "port")
    config.allow_remote = options.allow_remote
    config.device = None if options.device is None else as_text(options.device, "device")
    config.n_threads = as_int(options.threads, "threads")
    if options.allow_remote:
        print(REMOTE.format(options.host), file=sys.stderr)
    print(f"starting a server at rpc://{options.host}:{options.port}; Ctrl-C ends it", flush=True)
    # C does not come back to where Python looks for signals.
    handlers = {each: signal.signal(each, signal.SIG_DFL) for each in _ENDING}
    try:
        _lib.check(_lib.lib.cellkv_rpc_server_run(ctypes.byref(config)))
    except cellkv.UnsupportedError as error:
        print(f"cellkv: {error}. {NO_RPC}", file=sys.stderr)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    return 1


_ENDING = (signal.SIGINT, signal.SIGTERM)

if __name__ == "__main__":
    sys.exit(main())
