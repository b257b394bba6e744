/* What every part of the ghost shares: the configured device, its capacity, counters, the lock and opaque
 * handles. */
#include "core/ghost.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

/* Until it is configured the ghost is a small fictitious card whose name reveals the mistake. */
struct ghost_device ghost_spec = {
    .name = "memfit ghost (not configured)",
    .major = 8,
    .minor = 0,
    .multiprocessors = 108,
    .threads_per_multiprocessor = 2048,
    .blocks_per_multiprocessor = 32,
    .total_bytes = 8192 * MIB,
    .shared_per_block = 48 * KIB,
    .shared_per_block_optin = 163 * KIB,
    .shared_per_multiprocessor = 164 * KIB,
    .l2_bytes = 40 << 20,
    .memory_bus_bits = 5120,
    .clock_khz = 1410000,
    .memory_clock_khz = 1215000,
};
int ghost_device_count = 1;
struct device_memory ghost_devices[MAX_DEVICES];
struct counters ghost_counts;
_Thread_local int ghost_current_device;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void ghost_lock(void) { pthread_mutex_lock(&lock); }
void ghost_unlock(void) { pthread_mutex_unlock(&lock); }

/* A child forked while another thread held the lock would wait forever, so the forking thread holds the lock
 * across the fork, and both sides release it. */
__attribute__((constructor)) static void survive_fork(void)
{
    pthread_atfork(ghost_lock, ghost_unlock, ghost_unlock);
}

int64_t ghost_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* ---- Capacity -------------------------------------------------------------------------------- */

uint64_t capacity_used(int device) { return ghost_devices[device].others + ghost_devices[device].allocated; }

static void note_peak(int device)
{
    if (capacity_used(device) > ghost_devices[device].used_peak)
        ghost_devices[device].used_peak = capacity_used(device);
}

bool capacity_take(int device, uint64_t bytes)
{
    uint64_t used = capacity_used(device);
    if (used > ghost_spec.total_bytes || bytes > ghost_spec.total_bytes - used)
        return false;
    ghost_devices[device].allocated += bytes;
    note_peak(device);
    return true;
}

void capacity_release(int device, uint64_t bytes) { ghost_devices[device].allocated -= bytes; }

API int ghost_configure(const struct ghost_device *device, int count, uint64_t in_use)
{
    if (!device || count < 1 || count > MAX_DEVICES || in_use > device->total_bytes)
        return GHOST_BAD_ARGUMENT;
    if (!addresses_reserved())
        return GHOST_NO_ADDRESSES;
    HOLD_LOCK;
    for (int i = 0; i < MAX_DEVICES; i++)
        if (ghost_devices[i].allocated != 0)
            return GHOST_IN_USE;
    ghost_spec = *device;
    ghost_spec.name[sizeof ghost_spec.name - 1] = '\0';
    ghost_device_count = count;
    for (int i = 0; i < MAX_DEVICES; i++)
        ghost_devices[i] = (struct device_memory){.others = in_use, .used_peak = in_use};
    return SUCCESS;
}

API void ghost_set_capacity(uint64_t total)
{
    HOLD_LOCK;
    ghost_spec.total_bytes = total;
}

API void ghost_set_context_bytes(uint64_t bytes)
{
    HOLD_LOCK;
    for (int i = 0; i < MAX_DEVICES; i++)
        ghost_devices[i].own = bytes;
}

API void ghost_change_others(int64_t bytes)
{
    HOLD_LOCK;
    uint64_t *others = &ghost_devices[ghost_current_device].others;
    uint64_t released = bytes < 0 ? -(uint64_t)bytes : 0;
    if (bytes >= 0)
        *others += (uint64_t)bytes;
    else
        *others -= released < *others ? released : *others;
    note_peak(ghost_current_device);
}

API uint64_t ghost_counter(const char *name)
{
    HOLD_LOCK;
    int device = ghost_current_device;
    const struct {
        const char *name;
        uint64_t value;
    } known[] = {
        {"used", capacity_used(device)},
        {"used_peak", ghost_devices[device].used_peak},
        {"capacity", ghost_spec.total_bytes},
        {"mallocs", ghost_counts.mallocs},
        {"frees", ghost_counts.frees},
        {"maps", ghost_counts.maps},
        {"launches", ghost_counts.launches},
        {"copies", ghost_counts.copies},
        {"library_calls", ghost_counts.library_calls},
        {"cudnn_calls", ghost_counts.cudnn_calls},
        {"waits", ghost_counts.waits},
        {"replays", ghost_counts.replays},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, name) == 0)
            return known[i].value;
    return 0;
}

/* ---- Opaque handles -------------------------------------------------------------------------- */

status ghost_new_handle(void **out, size_t size)
{
    *out = calloc(1, size);
    return *out ? SUCCESS : OUT_OF_MEMORY;
}

size_t data_type_width(int data_type)
{
    enum { REAL_64 = 1, REAL_16 = 2, INT_8 = 3, COMPLEX_32 = 4, COMPLEX_64 = 5, UINT_8 = 8 };
    enum { BFLOAT_16 = 14, FLOAT_8_E4M3 = 28, FLOAT_8_E5M2 = 29 };
    switch (data_type) {
    case INT_8:
    case UINT_8:
    case FLOAT_8_E4M3:
    case FLOAT_8_E5M2: return 1;
    case REAL_16:
    case BFLOAT_16: return 2;
    case REAL_64:
    case COMPLEX_32: return 8;
    case COMPLEX_64: return 16;
    default: return 4; /* REAL_32, COMPLEX_16, COMPLEX_BFLOAT_16 and the 32-bit integers */
    }
}
