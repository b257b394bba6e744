/* The log of cudaMalloc and its kin, for the allocators whose history PyTorch does not keep. */
#include "core/ghost.h"

#include "array.h"

static struct {
    bool on;
    ARRAY(struct ghost_event);
} allocation_log;
static _Thread_local uint64_t label;

void log_allocation(enum ghost_action action, int device, uint64_t address, uint64_t size, const void *stream)
{
    if (!allocation_log.on)
        return;
    struct ghost_event *event = array_append(&allocation_log);
    if (event)
        *event = (struct ghost_event){action, device, address, size, (uint64_t)stream, label, ghost_now_us()};
    else
        allocation_log.on = false; /* a log with a hole would mislead, so it ends here */
}

API void ghost_set_label(uint64_t value) { label = value; }

uint64_t ghost_label(void) { return label; }

API void ghost_log_allocations(int on)
{
    HOLD_LOCK;
    allocation_log.on = on;
    if (on)
        allocation_log.count = 0;
}

API size_t ghost_allocation_log(struct ghost_event *out, size_t capacity)
{
    HOLD_LOCK;
    for (size_t i = 0; i < allocation_log.count && i < capacity; i++)
        out[i] = allocation_log.items[i];
    return allocation_log.count;
}
