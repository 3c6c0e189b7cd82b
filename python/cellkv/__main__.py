"""`python -m cellkv`: a demo, and what this installation consists of."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import cellkv

from . import _lib


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


if __name__ == "__main__":
    sys.exit(main())
