/* The driver API beneath the runtime: contexts, devices, modules, and the lookup of its functions.
 *
 * PyTorch reaches the driver by cudaGetDriverEntryPoint, libcaffe2_nvrtc and Triton by the symbols
 * of libcuda.so.1. There is one context per device and its handle is a number.
 */
#include "core/ghost.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

status cudaSetDevice(int device);

#define CONTEXT_BASE 0x1000 /* an opaque handle that must not be dereferenced */

static void *context_of(int device) { return (void *)(uint64_t)(CONTEXT_BASE + device); }

API status cuInit(unsigned flags) { return SUCCESS; }

API status cuDeviceGet(int *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= ghost_device_count)
        return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

ENTRY(cuDeviceGetName(char *name, int capacity, int device),
      snprintf(name, (size_t)capacity, "%s", ghost_spec.name))
ENTRY(cuDeviceTotalMem_v2(size_t *bytes, int device), *bytes = ghost_spec.total_bytes)

API status cuDeviceGetUuid(char *uuid, int device)
{
    memset(uuid, 0, 16);
    memcpy(uuid, "ghost", 5);
    uuid[5] = (char)device;
    return SUCCESS;
}

ALSO(cuDeviceGetUuid_v2, cuDeviceGetUuid)

/* ---- Contexts -------------------------------------------------------------------------------- */

API status cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    if (flags)
        *flags = 0;
    if (active)
        *active = 1;
    return SUCCESS;
}

API status cuDevicePrimaryCtxRetain(void **context, int device)
{
    if (device < 0 || device >= ghost_device_count)
        return INVALID_DEVICE;
    *context = context_of(device);
    return SUCCESS;
}

ENTRY(cuCtxGetCurrent(void **context), *context = context_of(ghost_current_device))
API status cuCtxSetCurrent(void *context)
{
    uint64_t device = (uint64_t)context - CONTEXT_BASE;
    return device < (uint64_t)ghost_device_count ? cudaSetDevice((int)device) : SUCCESS;
}

ALSO(cuCtxPushCurrent_v2, cuCtxSetCurrent)

API status cuCtxPopCurrent_v2(void **context) { return context ? cuCtxGetCurrent(context) : SUCCESS; }

ENTRY(cuCtxGetLimit(size_t *value, int limit), *value = 0)

/* ---- Finding functions by name --------------------------------------------------------------- */

enum { ENTRY_FOUND = 0, ENTRY_NOT_FOUND = 1 }; /* cudaDriverEntryPointQueryResult */

/* Every driver function of the ghost is in this library: written here, or generated from gaps.txt. */
static void *find_function(const char *name)
{
    static void *self;
    Dl_info here;
    if (!self && dladdr((void *)&cuInit, &here))
        self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    return self ? dlsym(self, name) : NULL;
}

static status entry_point(const char *name, void **function, int *found)
{
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = find_function(newer); /* the plain name stands for the newest */
    if (!*function)
        *function = find_function(name);
    if (!*function) {
        char *unknown = strdup(name); /* never freed: the record of gaps points to it */
        if (unknown)
            ghost_assumed(unknown);
    }
    if (found)
        *found = *function ? ENTRY_FOUND : ENTRY_NOT_FOUND;
    return SUCCESS;
}

CALL(cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                      unsigned long long flags, int *found),
     entry_point(name, function, found))
CALL(cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *found),
     entry_point(name, function, found))
CALL(cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found),
     entry_point(name, function, found))

/* ---- Modules: what nvrtc and Triton compiled ------------------------------------------------- */

API status cuModuleLoadData(void **module, const void *image) { return ghost_new_handle(module, 64); }
ALSO(cuModuleLoad, cuModuleLoadData)
CALL(cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values),
     ghost_new_handle(module, 64))
ENTRY(cuModuleUnload(void *module), free(module))
CALL(cuModuleGetFunction(void **function, void *module, const char *name), ghost_new_handle(function, 64))
CALL(cudaLibraryLoadData(void **library, const void *code, int *options, void **values, unsigned count,
                         int *library_options, void **library_values, unsigned library_count),
     ghost_new_handle(library, 64))
CALL(cudaLibraryGetKernel(void **kernel, void *library, const char *name), ghost_new_handle(kernel, 64))
ENTRY(cudaLibraryUnload(void *library), free(library))
CALL(cuLinkCreate_v2(unsigned count, int *options, void **values, void **state), ghost_new_handle(state, 64))

API status cuLinkComplete(void *state, void **binary, size_t *size)
{
    static char nothing[1];
    *binary = nothing;
    *size = sizeof nothing;
    return SUCCESS;
}

ENTRY(cuLinkDestroy(void *state), free(state))

/* Settings of contexts and kernels, which have no effect here. PyTorch looks them up by name, so the builder
 * cannot see that they are needed. */
API status cuCtxSetLimit(int limit, size_t value) { return SUCCESS; }
API status cuFuncSetCacheConfig(void *function, int config) { return SUCCESS; }
API status cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }

API status cuLogsRegisterCallback(void *callback, void *data, void **handle)
{
    if (handle)
        *handle = callback; /* never called: the ghost has nothing to log */
    return SUCCESS;
}

API status cuLogsUnregisterCallback(void *handle) { return SUCCESS; }

/* A tensor map is 128 opaque bytes that only kernels read. Source: cuda.h, CUtensorMap. */
ENTRY(cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dimensions,
                             const uint64_t *strides, const unsigned *box, const unsigned *element_strides,
                             int interleave, int swizzle, int promotion, int fill),
      memset(map, 0, 128))
ENTRY(cuTensorMapEncodeIm2col(void *map, int type, unsigned rank, void *address, const uint64_t *dimensions,
                              const uint64_t *strides, const int *lower, const int *upper, unsigned channels,
                              unsigned columns, const unsigned *element_strides, int interleave, int swizzle,
                              int promotion, int fill),
      memset(map, 0, 128))
