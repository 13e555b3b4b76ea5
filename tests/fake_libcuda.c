/* The calls of the CUDA driver that Triton's launcher makes, for a GPU that is not there: launches are recorded.

   A tensor map holds what it was asked to describe, so that two of them can be compared. */

#include "cuda.h"
#include <stdint.h>
#include <string.h>

enum { MAX_FUNCTIONS = 256, MAX_PARAMETERS = 96, LOG_BYTES = 1 << 22 };

static uint32_t parameter_count[MAX_FUNCTIONS], parameter_sizes[MAX_FUNCTIONS][MAX_PARAMETERS];
static uintptr_t functions = 0;
static unsigned char launched[LOG_BYTES];
static uint64_t launched_bytes = 0;

static void record(const void *from, uint64_t bytes) {
    if (launched_bytes + bytes <= LOG_BYTES) memcpy(launched + launched_bytes, from, bytes);
    launched_bytes += bytes;
}

/* Functions are numbered from 1 on, as they are asked for. */
void fake_declare(uint64_t function, uint32_t count, const uint32_t *sizes) {
    parameter_count[function] = count;
    memcpy(parameter_sizes[function], sizes, count * sizeof *sizes);
}

/* All launches since the last call of this: gives their bytes in all. */
uint64_t fake_launched(const void **found) {
    uint64_t bytes = launched_bytes;
    *found = launched;
    launched_bytes = 0;
    return bytes;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    uint64_t f = (uint64_t)function;
    uint64_t head[] = {f, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                       config->blockDimZ, config->sharedMemBytes, (uint64_t)config->hStream, config->numAttrs};
    if (extra) return CUDA_ERROR_INVALID_VALUE;
    record(head, sizeof head);
    for (unsigned i = 0; i < config->numAttrs; i++) {
        uint64_t id = config->attrs[i].id, value = config->attrs[i].value.programmaticStreamSerializationAllowed;
        record(&id, sizeof id);
        record(&value, sizeof value);
    }
    uint64_t count = parameter_count[f];
    record(&count, sizeof count);
    for (unsigned i = 0; i < count; i++) {
        uint64_t size = parameter_sizes[f][i];
        record(&size, sizeof size);
        record(parameters[i], size);
    }
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    uint64_t hash = 14695981039346656037u, *words = (uint64_t *)map;
    uint32_t sums[] = {type, rank, interleave, swizzle, promotion, fill};
    memset(map, 0, sizeof *map);
    words[0] = (uint64_t)address;
    memcpy(words + 1, sums, sizeof sums);
    for (unsigned i = 0; i < rank; i++) {
        words[4 + i] = dims[i];
        words[9 + i] = i + 1 < rank ? strides[i] : 0;
        hash = (hash ^ box[i]) * 1099511628211u;
        hash = (hash ^ element_strides[i]) * 1099511628211u;
    }
    words[14] = hash;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)image, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return *function = (CUfunction)++functions, functions < MAX_FUNCTIONS ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return *value = 227 * 1024, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    return *(CUdeviceptr *)value = pointer, CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return *context = (CUcontext)1, CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    return *clusters = 1, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "refused", CUDA_SUCCESS; }
