"""The command line: `python -m tiled_attention info | compare | heatmap`."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    from . import info
    from .compare import command
    from .plot import command as pictures

    parser = argparse.ArgumentParser(prog="python -m tiled_attention", description="Exact attention for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    info.add_arguments(commands.add_parser("info", help="print build, instruction set, versions and threads"))
    compare = commands.add_parser("compare", help="compare with F.scaled_dot_product_attention and nn.MultiheadAttention")
    command.add_arguments(compare)
    pictures.add_arguments(commands.add_parser("heatmap", help="where the tokens of a text look, in a model: a page for a browser"))
    arguments = parser.parse_args(argv)
    if arguments.command == "info":
        return info.run(arguments)
    if arguments.command == "heatmap":
        return pictures.run(arguments)
    return command.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
