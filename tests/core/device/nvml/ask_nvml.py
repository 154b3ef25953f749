"""Answer each line on standard input with what `nvml_memory` reports for a GPU: JSON in, JSON out.

Of torch, that only asks whether it was built for ROCm: this process has a stand-in, as torch takes a second to import.
"""

import json
import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

if __name__ == "__main__":
    torch = ModuleType("torch")
    torch.version = SimpleNamespace(hip=None)
    sys.modules["torch"] = torch

    from lightning_memguard.core.device.nvml import GpuFacts, nvml_memory

    print("ready", flush=True)
    for line in sys.stdin:
        facts = json.loads(line)
        memory = nvml_memory(GpuFacts(**facts | {"uuids": tuple(facts["uuids"])}))
        print(json.dumps(memory and asdict(memory)), flush=True)
