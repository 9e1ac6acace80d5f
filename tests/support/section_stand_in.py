"""A section of the GPU benchmark that notes when it was imported and begun; the split one hangs."""

import os
import sys
import time
from pathlib import Path

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
name = arguments["--section"]
out = Path(arguments["--out"])
(out / f"{name}.imported").touch()
seconds = float(os.read(int(arguments["--start"]), 64))
assert 0 < seconds < 20, seconds
(out / f"{name}.begun").touch()
if name == "split":
    time.sleep(600)
