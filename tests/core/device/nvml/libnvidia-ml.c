/* As much of NVML as nvidia-ml-py needs to read a device's memory. It answers from the text file that FAKE_NVML names,
 * read again at every call, one fact a line:
 *     fail <function> <return code>
 *     gpu <uuid> <pci bus id> <total> <driver's share> <used>
 *     process <pid> <used>         of each GPU; pid 0 is the process that asks, used -1 not available
 * Compile with -DBEFORE_510 for a driver that has no second version of the memory info. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6 };

typedef struct { char uuid[96], pci[32]; unsigned long long total, reserved, used; } Gpu;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;

/* Reads the file: the return code of `function`, and the GPUs. */
static int ask(const char *function, Gpu *gpus, int *count) {
    char line[256], name[96];
    int code, result = SUCCESS;
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    *count = 0;
    while (file && fgets(line, sizeof line, file)) {
        Gpu *gpu = &gpus[*count];
        if (sscanf(line, "fail %95s %d", name, &code) == 2 && !strcmp(name, function)) result = code;
        if (sscanf(line, "gpu %95s %31s %llu %llu %llu", gpu->uuid, gpu->pci, &gpu->total, &gpu->reserved, &gpu->used) == 5)
            ++*count;
    }
    if (file) fclose(file);
    return result;
}

static int plain(const char *function) { Gpu gpus[16]; int count; return ask(function, gpus, &count); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return plain("init"); }
int nvmlShutdown(void) { return plain("shutdown"); }

/* A handle is the place in the list, counted from one. */
static int find(const char *function, const char *uuid, const char *pci, unsigned index, void **handle) {
    Gpu gpus[16];
    int count, code = ask(function, gpus, &count);
    if (code) return code;
    for (int i = 0; i < count; i++)
        if (uuid ? !strcmp(gpus[i].uuid, uuid) : pci ? !strcmp(gpus[i].pci, pci) : i == (int)index) {
            *handle = (void *)(size_t)(i + 1);
            return SUCCESS;
        }
    return uuid || pci ? NOT_FOUND : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) { return find("by_uuid", uuid, NULL, 0, handle); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **handle) { return find("by_pci", NULL, pci, 0, handle); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return find("by_index", NULL, NULL, index, handle); }

/* The first version counts the driver's share as used. */
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    Gpu gpus[16];
    int count, code = ask("memory", gpus, &count);
    Gpu gpu = gpus[(size_t)handle - 1];
    if (code) return code;
    *memory = (Memory){gpu.total, gpu.total - gpu.reserved - gpu.used, gpu.reserved + gpu.used};
    return SUCCESS;
}

#ifndef BEFORE_510
int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
    Gpu gpus[16];
    int count, code = ask("memory_v2", gpus, &count);
    Gpu gpu = gpus[(size_t)handle - 1];
    if (code) return code;
    if (memory->version != (sizeof *memory | 2u << 24)) return 25; /* argument version mismatch */
    memory->total = gpu.total, memory->reserved = gpu.reserved, memory->used = gpu.used;
    memory->free = gpu.total - gpu.reserved - gpu.used;
    return SUCCESS;
}
#endif

typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute_instance; } Process;

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    char line[256];
    unsigned found = 0, room = *count, pid;
    long long used;
    int code = plain("processes");
    FILE *file = code ? NULL : fopen(getenv("FAKE_NVML"), "r");
    (void)handle;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "process %u %lld", &pid, &used) == 2) {
            if (found < room) processes[found] = (Process){pid ? pid : (unsigned)getpid(), (unsigned long long)used, 0, 0};
            found++;
        }
    if (file) fclose(file);
    *count = found;
    return code ? code : found > room ? 7 : SUCCESS; /* insufficient size */
}
