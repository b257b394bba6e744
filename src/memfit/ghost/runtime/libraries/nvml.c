/* NVML: what torch.cuda.device_count, pynvml and PyTorch's expandable segments query about the machine.
 *
 * Source of the layouts: nvml.h of the CUDA 12 and 13 toolkits. A device handle is its index + 1.
 */
#include "core/ghost.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7 };

static void *handle_of(unsigned index) { return (void *)(uint64_t)(index + 1); }
static int index_of(const void *handle) { return (int)(uint64_t)handle - 1; }

API status nvmlInit(void) { return SUCCESS; }
API status nvmlInit_v2(void) { return SUCCESS; }
API status nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
API status nvmlShutdown(void) { return SUCCESS; }

API const char *nvmlErrorString(status error)
{
    return error == SUCCESS ? "success" : "not supported by memfit's ghost";
}

ENTRY(nvmlSystemGetCudaDriverVersion_v2(int *version), *version = CUDA_VERSION)
ALSO(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2)
ENTRY(nvmlSystemGetDriverVersion(char *text, unsigned capacity), snprintf(text, capacity, "memfit ghost"))

/* ---- Devices --------------------------------------------------------------------------------- */

/* NVML counts the machine's cards, before CUDA_VISIBLE_DEVICES picks some of them. A script that
 * picks card 3 expects it to exist, so then the machine reports as many cards as the ghost allows. */
ENTRY(nvmlDeviceGetCount_v2(unsigned *count),
      *count = getenv("CUDA_VISIBLE_DEVICES") ? MAX_DEVICES : (unsigned)ghost_device_count)
ALSO(nvmlDeviceGetCount, nvmlDeviceGetCount_v2)

API status nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    if (index >= MAX_DEVICES)
        return NVML_INVALID_ARGUMENT;
    *handle = handle_of(index);
    return SUCCESS;
}

ALSO(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2)
ENTRY(nvmlDeviceGetIndex(void *handle, unsigned *index), *index = (unsigned)index_of(handle))

/* The bus is the device's number + 1, as in cudaDeviceGetPCIBusId. */
API status nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **handle)
{
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x:", &domain, &bus) != 2 || bus == 0 || bus > MAX_DEVICES)
        return NVML_NOT_FOUND;
    *handle = handle_of(bus - 1);
    return SUCCESS;
}

API status nvmlDeviceGetUUID(void *handle, char *uuid, unsigned capacity)
{
    /* "ghost" and the index, as in cudaDeviceProp.uuid */
    snprintf(uuid, capacity, "GPU-67686f73-74%02x-0000-0000-000000000000", index_of(handle) & 0xff);
    return SUCCESS;
}

API status nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    char candidate[80];
    for (unsigned index = 0; index < MAX_DEVICES; index++) {
        nvmlDeviceGetUUID(handle_of(index), candidate, sizeof candidate);
        if (strcmp(candidate, uuid) == 0)
            return nvmlDeviceGetHandleByIndex_v2(index, handle);
    }
    return NVML_NOT_FOUND;
}

ENTRY(nvmlDeviceGetName(void *handle, char *name, unsigned capacity),
      snprintf(name, capacity, "%s", ghost_spec.name))

/* ---- Use ------------------------------------------------------------------------------------- */

struct memory_info {
    unsigned long long total, free, used;
};

API status nvmlDeviceGetMemoryInfo(void *handle, struct memory_info *info)
{
    int device = index_of(handle);
    if (device < 0 || device >= MAX_DEVICES)
        return NVML_INVALID_ARGUMENT;
    HOLD_LOCK;
    uint64_t total = ghost_spec.total_bytes, used = capacity_used(device);
    *info = (struct memory_info){total, used < total ? total - used : 0, used};
    return SUCCESS;
}

ENTRY(nvmlDeviceGetUtilizationRates(void *handle, unsigned *gpu_and_memory),
      gpu_and_memory[0] = gpu_and_memory[1] = 0)

/* nvmlProcessInfo_v1_t, with which later versions begin. */
struct process_info {
    unsigned pid;
    unsigned long long used_bytes;
};

/* nvmlProcessInfo_v2_t, which _v3 of the function fills. */
struct process_info_v2 {
    struct process_info process;
    unsigned gpu_instance, compute_instance;
};

#define NO_INSTANCE 0xffffffffu /* of a card without MIG instances */

/* The only process on the card is this one, listed once it has allocated memory. */
API status nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, struct process_info *out)
{
    int device = index_of(handle);
    if (device < 0 || device >= MAX_DEVICES || !count)
        return NVML_INVALID_ARGUMENT;
    HOLD_LOCK;
    uint64_t allocated = ghost_devices[device].allocated, own = ghost_devices[device].own;
    unsigned room = *count;
    *count = allocated ? 1 : 0;
    if (room < *count)
        return NVML_INSUFFICIENT_SIZE;
    if (*count && out)
        *out = (struct process_info){(unsigned)getpid(), own + allocated};
    return SUCCESS;
}

API status nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process_info_v2 *out)
{
    status answer = nvmlDeviceGetComputeRunningProcesses(handle, count, out ? &out->process : NULL);
    if (answer == SUCCESS && *count && out)
        out->gpu_instance = out->compute_instance = NO_INSTANCE;
    return answer;
}

/* ---- Links: there are none ------------------------------------------------------------------- */

CALL(nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type), NVML_NOT_SUPPORTED)
ALSO(nvmlDeviceGetNvLinkRemotePciInfo_v2, nvmlDeviceGetNvLinkRemoteDeviceType)

/* NVML_P2P_STATUS_OK, like cudaDeviceCanAccessPeer */
ENTRY(nvmlDeviceGetP2PStatus(void *handle, void *peer, int capability, int *p2p_status), *p2p_status = 0)

/* Source: nvml.h, nvmlGpuFabricInfo_v2_t. Queried by expandable segments before they share memory. */
struct fabric_info {
    unsigned version;
    unsigned char cluster_uuid[16];
    int result;
    unsigned clique_id;
    unsigned char state; /* 0: NVML_GPU_FABRIC_STATE_NOT_SUPPORTED */
};

API status nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric_info *info)
{
    memset(info->cluster_uuid, 0, sizeof info->cluster_uuid);
    info->result = SUCCESS;
    info->clique_id = 0;
    info->state = 0;
    return SUCCESS;
}
