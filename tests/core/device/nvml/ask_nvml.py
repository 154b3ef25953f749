"""Answer each line on standard input with what NVML reports for a GPU: JSON in, JSON out.

With ``"process"``, that is what it reports of this process, else its memory.
"""

import json
import sys
from dataclasses import asdict

from lightning_memguard.core.device.nvml import GpuFacts, nvml_memory, nvml_process_bytes

if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        facts = json.loads(line)
        of_process = facts.pop("process", False)
        gpu = GpuFacts(**facts | {"uuids": tuple(facts["uuids"])})
        memory = None if of_process else nvml_memory(gpu)
        answer = {"process": nvml_process_bytes(gpu)} if of_process else memory and asdict(memory)
        print(json.dumps(answer), flush=True)
