"""Answer each line on standard input with what `nvml_memory` reports for a GPU: JSON in, JSON out."""

import json
import sys
from dataclasses import asdict

from lightning_memguard.core.device.nvml import GpuFacts, nvml_memory

if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        facts = json.loads(line)
        memory = nvml_memory(GpuFacts(**facts | {"uuids": tuple(facts["uuids"])}))
        print(json.dumps(memory and asdict(memory)), flush=True)
