/* A GPU that is not there: the functions of CUDA's runtime, driver and cuBLAS that PyTorch calls, without a device.
 *
 * Preloaded into a process (LD_PRELOAD), it lets PyTorch's own caching allocator, autograd engine and Trainer run as on
 * an H100: memory is the host's, copies copy, kernels do nothing, so that numbers are zeros or leftovers. As a real
 * driver, it refuses every call in a forked child (cudaErrorInitializationError), and it counts them. cuDNN finds
 * no device here: convolutions and RNNs fail. Declarations are those of CUDA 13 (cuda_runtime_api.h, driver_types.h),
 * by hand, since its headers need not be installed.
 *
 * cc -shared -fPIC -O1 -Wl,-soname,libcuda.so.1 cuda.c -o libcuda.so.1
 */
#define _GNU_SOURCE
#include <execinfo.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <unistd.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3 };
enum { UNREGISTERED = 0, HOST = 1, DEVICE = 2 };                                          /* cudaMemoryType */
static const size_t TOTAL = 85017493504UL, CONTEXT = 500UL << 20;                           /* an H100's, as recorded */

/* -- refused calls: children attach the segment when they need it, since MemGuard's own cut off what they share -- */

struct refusals { int count; char first[4096]; };
static int segment;
static pid_t born;
static int last_error;

__attribute__((constructor)) static void begin(void) {
    born = getpid();
    segment = shmget(IPC_PRIVATE, sizeof(struct refusals), 0600);
    shmat(segment, NULL, 0);
    shmctl(segment, IPC_RMID, NULL); /* gone with the last process that has it attached */
}

/* How many calls children of this process made, and where the first came from. */
int fake_gpu_refusals(char *first, size_t nbytes) {
    struct refusals *all = shmat(segment, NULL, 0);
    int count = all->count;
    snprintf(first, nbytes, "%s", all->first);
    shmdt(all);
    return count;
}

static int refuse(const char *function) {
    struct refusals *all = shmat(segment, NULL, 0);
    if (all != (void *)-1) {
        if (__sync_fetch_and_add(&all->count, 1) == 0) {
            void *frames[24];
            int depth = backtrace(frames, 24), used = snprintf(all->first, sizeof all->first, "%s", function);
            char **names = backtrace_symbols(frames, depth);
            for (int i = 2; names && i < depth && used < (int)sizeof all->first; i++)
                used += snprintf(all->first + used, sizeof all->first - used, "\n  %s", names[i]);
        }
        shmdt(all);
    }
    return last_error = NOT_INITIALIZED;
}

#define IN_OWN_PROCESS if (getpid() != born) return refuse(__func__)
#define CALL(name, parameters, ...) int name parameters { IN_OWN_PROCESS; __VA_ARGS__; return SUCCESS; }
#define DONE(name) int name(void) { IN_OWN_PROCESS; return SUCCESS; } /* whatever it is given */

/* -- memory: pages of the host, taken when they are written -- */

static struct block { char *start; size_t nbytes; int kind; struct block *next; } *blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used;

static int take(void **out, size_t nbytes, int kind) {
    nbytes += !nbytes;
    pthread_mutex_lock(&lock);
    int full = kind == DEVICE && used + nbytes + CONTEXT > TOTAL;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *start = full ? MAP_FAILED : mmap(NULL, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (start != MAP_FAILED) {
        struct block *made = malloc(sizeof *made);
        *made = (struct block){start, nbytes, kind, blocks};
        blocks = made;
        used += kind == DEVICE ? nbytes : 0;
        *out = start;
    }
    pthread_mutex_unlock(&lock);
    return start == MAP_FAILED ? (last_error = OUT_OF_MEMORY) : SUCCESS;
}

static void give_back(const void *start) {
    pthread_mutex_lock(&lock);
    for (struct block **place = &blocks; *place; place = &(*place)->next)
        if ((*place)->start == start) {
            struct block *gone = *place;
            *place = gone->next;
            used -= gone->kind == DEVICE ? gone->nbytes : 0;
            munmap(gone->start, gone->nbytes);
            free(gone);
            break;
        }
    pthread_mutex_unlock(&lock);
}

static int kind_of(const char *address) {
    int kind = UNREGISTERED;
    pthread_mutex_lock(&lock);
    for (struct block *each = blocks; each; each = each->next)
        if (address >= each->start && address < each->start + each->nbytes) kind = each->kind;
    pthread_mutex_unlock(&lock);
    return kind;
}

CALL(cudaMalloc, (void **out, size_t nbytes), return take(out, nbytes, DEVICE))
CALL(cudaHostAlloc, (void **out, size_t nbytes, unsigned flags), return take(out, nbytes, HOST))
CALL(cudaGetSymbolAddress, (void **out, const void *symbol), return take(out, 1 << 20, HOST))
CALL(cudaFree, (void *start), give_back(start))
CALL(cudaFreeHost, (void *start), give_back(start))
CALL(cudaMemGetInfo, (size_t *free_bytes, size_t *total), *total = TOTAL; *free_bytes = TOTAL - CONTEXT - used)
CALL(cudaMemcpy, (void *to, const void *from, size_t nbytes, int kind), memcpy(to, from, nbytes))
CALL(cudaMemcpyAsync, (void *to, const void *from, size_t nbytes, int kind, void *stream), memcpy(to, from, nbytes))
CALL(cudaMemset, (void *to, int value, size_t nbytes), memset(to, value, nbytes))
CALL(cudaMemsetAsync, (void *to, int value, size_t nbytes, void *stream), memset(to, value, nbytes))
DONE(cudaMemcpyToSymbol)
DONE(cudaHostRegister)
DONE(cudaHostUnregister)

struct pointer { int kind, device; void *on_device, *on_host; }; /* cudaPointerAttributes */
CALL(cudaPointerGetAttributes, (struct pointer *out, void *address),
     *out = (struct pointer){kind_of(address), 0, address, address})

/* -- the device -- */

enum { PROPERTIES_BYTES = 1008 }; /* sizeof(cudaDeviceProp); below, the offsets of its fields */

static void put(void *properties, size_t offset, int value) { memcpy((char *)properties + offset, &value, sizeof value); }

CALL(cudaGetDeviceProperties, (void *out, int device), memset(out, 0, PROPERTIES_BYTES);
     strcpy(out, "NVIDIA H100 80GB HBM3");
     memcpy((char *)out + 288, &TOTAL, sizeof TOTAL);
     put(out, 296, 49152);                                                 /* sharedMemPerBlock */
     put(out, 304, 65536); put(out, 632, 65536);                           /* regsPerBlock, regsPerMultiprocessor */
     put(out, 308, 32);                                                    /* warpSize */
     put(out, 320, 1024);                                                  /* maxThreadsPerBlock */
     put(out, 324, 1024); put(out, 328, 1024); put(out, 332, 64);          /* maxThreadsDim */
     put(out, 336, 2147483647); put(out, 340, 65535); put(out, 344, 65535); /* maxGridSize */
     put(out, 360, 9);                                                     /* major; minor is 0 */
     put(out, 368, 512);                                                   /* textureAlignment */
     put(out, 384, 132);                                                   /* multiProcessorCount */
     put(out, 596, 52428800);                                              /* l2CacheSize */
     put(out, 604, 2048);                                                  /* maxThreadsPerMultiProcessor */
     put(out, 624, 233472); put(out, 672, 232448);                         /* sharedMemPerMultiprocessor, ...BlockOptin */
     put(out, 688, 32))                                                    /* maxBlocksPerMultiProcessor */

static int attribute(int number) { /* cudaDeviceAttr */
    switch (number) {
        case 1: return 1024;     /* MaxThreadsPerBlock */
        case 8: return 49152;    /* MaxSharedMemoryPerBlock */
        case 10: return 32;      /* WarpSize */
        case 16: return 132;     /* MultiProcessorCount */
        case 39: return 2048;    /* MaxThreadsPerMultiProcessor */
        case 75: return 9;       /* ComputeCapabilityMajor */
        case 76: return 0;       /* ComputeCapabilityMinor */
        case 81: return 233472;  /* MaxSharedMemoryPerMultiprocessor */
        case 97: return 232448;  /* MaxSharedMemoryPerBlockOptin */
        default: return 1;
    }
}

CALL(cudaDeviceGetAttribute, (int *out, int number, int device), *out = attribute(number))
CALL(cudaGetDeviceCount, (int *out), *out = 1)
CALL(cudaGetDevice, (int *out), *out = 0)
CALL(cudaDeviceCanAccessPeer, (int *out, int device, int peer), *out = 0)
CALL(cudaDeviceGetPCIBusId, (char *out, int length, int device), strncpy(out, "0000:00:01.0", length))
CALL(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), *least = 0; *greatest = -5)
CALL(cudaDriverGetVersion, (int *out), *out = 13000)
CALL(cudaRuntimeGetVersion, (int *out), *out = 13000)
CALL(cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active), *flags = 0; *active = 1)
CALL(cuCtxGetCurrent, (void **out), *out = &used)
CALL(cudaGetDriverEntryPointByVersion,
     (const char *name, void **out, unsigned version, unsigned long long flags, int *found), *out = NULL; *found = 1)
DONE(cudaSetDevice)
DONE(cudaDeviceEnablePeerAccess)
DONE(cudaDeviceSynchronize)

int cudaPeekAtLastError(void) { return last_error; }
int cudaGetLastError(void) {
    int error = last_error;
    last_error = SUCCESS;
    return error;
}

/* -- the driver, as Triton and PyTorch's launcher of its kernels call it -- */

CALL(cuDeviceGet, (int *out, int ordinal), *out = ordinal)
CALL(cuDeviceGetAttribute, (int *out, int number, int device), *out = attribute(number))
CALL(cuDevicePrimaryCtxRetain, (void **out, int device), *out = &used)
CALL(cuModuleLoadData, (void **out, const void *image), *out = &used)
CALL(cuModuleLoad, (void **out, const char *path), *out = &used)
CALL(cuModuleGetFunction, (void **out, void *module, const char *name), *out = &used)
CALL(cuFuncGetAttribute, (int *out, int number, void *function), *out = 0)
CALL(cuPointerGetAttribute, (void **out, int number, void *address), *out = address)
CALL(cuCtxGetLimit, (size_t *out, int limit), *out = 0)
CALL(cuGetErrorString, (int error, const char **out), *out = "refused")
CALL(cuCtxGetDevice, (int *out), *out = 0)
CALL(cuDriverGetVersion, (int *out), *out = 13000)
CALL(cuStreamIsCapturing, (void *stream, int *out), *out = 0)
DONE(cuModuleUnload)
DONE(cuCtxSetCurrent)
DONE(cuCtxSetLimit)
DONE(cuFuncSetAttribute)
DONE(cuFuncSetCacheConfig)
DONE(cuLaunchKernel)
DONE(cuLaunchKernelEx)

/* -- streams, events, kernels: nothing waits, nothing runs -- */

struct size3 { unsigned x, y, z; }; /* dim3 */
CALL(cudaStreamCreate, (void **out), *out = malloc(1))
CALL(cudaStreamCreateWithPriority, (void **out, unsigned flags, int priority), *out = malloc(1))
CALL(cudaStreamGetPriority, (void *stream, int *out), *out = 0)
CALL(cudaStreamIsCapturing, (void *stream, int *out), *out = 0)
CALL(cudaStreamGetCaptureInfo, (void *stream, int *out, void *id, void *graph, void *nodes, void *edges, void *count),
     *out = 0)
CALL(cudaEventCreate, (void **out), *out = malloc(1))
CALL(cudaEventCreateWithFlags, (void **out, unsigned flags), *out = malloc(1))
CALL(cudaEventElapsedTime, (float *out, void *from, void *to), *out = 1)
CALL(cudaLaunchHostFunc, (void *stream, void (*function)(void *), void *data), function(data))
CALL(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
     (int *out, const void *kernel, int threads, size_t shared, unsigned flags), *out = 8)
CALL(cudaFuncGetAttributes, (int *out, const void *kernel), memset(out, 0, 144);
     out[6] = 1024; out[7] = 32; out[8] = out[9] = 90) /* maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion */
DONE(cudaFuncSetAttribute)
DONE(cudaLaunchKernel)
DONE(__cudaLaunchKernel)
DONE(cudaLaunchKernelExC)
DONE(cudaEventDestroy)
DONE(cudaEventQuery)
DONE(cudaEventRecord)
DONE(cudaEventRecordWithFlags)
DONE(cudaEventSynchronize)
DONE(cudaStreamDestroy)
DONE(cudaStreamQuery)
DONE(cudaStreamSynchronize)
DONE(cudaStreamWaitEvent)
DONE(cudaThreadExchangeStreamCaptureMode)

/* -- cuBLAS, whose own library asks for a device -- */

CALL(cublasCreate_v2, (void **out), *out = malloc(1))
CALL(cublasGetMathMode, (void *handle, int *out), *out = 0)
CALL(cublasGetPointerMode_v2, (void *handle, int *out), *out = 0)
CALL(cublasLtMatmulDescCreate, (void **out, int compute, int scale), *out = calloc(1, 256))
CALL(cublasLtMatmulPreferenceCreate, (void **out), *out = calloc(1, 256))
CALL(cublasLtMatrixLayoutCreate, (void **out, int type, uint64_t rows, uint64_t columns, int64_t step),
     *out = calloc(1, 256))
CALL(cublasLtMatmulAlgoGetHeuristic,
     (void *handle, void *op, void *a, void *b, void *c, void *d, void *preference, int asked, void *out, int *found),
     memset(out, 0, 64); *found = 1)
DONE(cublasDestroy_v2)
DONE(cublasSetMathMode)
DONE(cublasSetPointerMode_v2)
DONE(cublasSetStream_v2)
DONE(cublasSetWorkspace_v2)
DONE(cublasSgemm_v2)
DONE(cublasDgemm_v2)
DONE(cublasGemmEx)
DONE(cublasSgemmEx)
DONE(cublasGemmStridedBatchedEx)
DONE(cublasSgemmStridedBatched)
DONE(cublasDgemmStridedBatched)
DONE(cublasSgemv_v2)
DONE(cublasDgemv_v2)
DONE(cublasSdot_v2)
DONE(cublasDotEx)
DONE(cublasStrsm_v2)
DONE(cublasLtMatmul)
DONE(cublasLtMatmulDescSetAttribute)
DONE(cublasLtMatmulDescDestroy)
DONE(cublasLtMatmulPreferenceSetAttribute)
DONE(cublasLtMatmulPreferenceDestroy)
DONE(cublasLtMatrixLayoutDestroy)
