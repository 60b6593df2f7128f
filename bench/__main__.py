"""`python -m bench [NAME] [options]`: all measurements in turn, or one of them."""

import argparse
import importlib
import sys

NAMES = ("overlap", "overhead", "gateway", "load", "fairness", "timing", "irp", "embeddings", "accuracy")


def main() -> None:
    chosen = sys.argv[1:2] if sys.argv[1:] and not sys.argv[1].startswith("-") else []
    if chosen and chosen[0] not in NAMES:
        sys.exit(f"no measurement {chosen[0]!r}; there are {', '.join(NAMES)}")
    for name in chosen or NAMES:
        module = importlib.import_module(f"bench.{name}")
        parser = argparse.ArgumentParser(
            prog=f"python -m bench {name}",
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(parser)
        module.run(parser.parse_args(sys.argv[2:] if chosen else []))


if __name__ == "__main__":
    main()
