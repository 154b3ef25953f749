"""Answer, a line for a line on standard input, what `nvml_room` says of a GPU: facts as JSON in, room as JSON out."""

import json
import sys
from dataclasses import asdict

from lightning_memguard.core.device.nvml import GpuFacts, nvml_room

if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        facts = json.loads(line)
        room = nvml_room(GpuFacts(**facts | {"uuids": tuple(facts["uuids"])}))
        print(json.dumps(room and asdict(room)), flush=True)
