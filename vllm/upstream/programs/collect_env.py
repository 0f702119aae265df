"""python -m vllm.collect_env: what `vllm collect-env` prints."""

from vllm.cli.collect_env import described
from vllm.cli.main import main as run_command


def get_pretty_env_info() -> str:
    """The same as a text."""
    return described()


def main() -> None:
    """Print it."""
    run_command(["collect-env"])


if __name__ == "__main__":
    main()
