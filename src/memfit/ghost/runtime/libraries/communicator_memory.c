/* NCCL's own buffers, which are outside PyTorch's allocator.
 *
 * Their size is for the function set with ghost_set_communicator_sizes to say: when a communicator is made, and
 * whenever it is first used in a way that makes NCCL connect ranks. The ghost takes them from the device, even
 * where too little is free: PyTorch's next allocation then fails.
 */
#include "libraries/nccl.h"

struct communicator_memory {
    struct ghost_communicator use;
    uint64_t bytes;
    int device;
    bool *sent, *received; /* by rank: whether this rank has sent to it, or received from it */
};

static ghost_communicator_sizes sizes;
static uint64_t held, held_peak; /* bytes of all communicators, now and at most; with the lock held */

API void ghost_set_communicator_sizes(ghost_communicator_sizes function) { sizes = function; }

API uint64_t ghost_communicator_bytes(void)
{
    HOLD_LOCK;
    return held_peak;
}

static void hold(struct communicator_memory *memory, uint64_t bytes)
{
    HOLD_LOCK;
    uint64_t more = bytes - memory->bytes; /* modulo 2^64 where it is less */
    ghost_devices[memory->device].others += more;
    ghost_devices[memory->device].own += more;
    held += more;
    if (held > held_peak)
        held_peak = held;
    memory->bytes = bytes;
}

static void resize(struct communicator_memory *memory)
{
    if (sizes)
        hold(memory, sizes(&memory->use));
}

struct communicator_memory *communicator_memory(const struct ghost_communicator *use)
{
    struct communicator_memory *memory = calloc(1, sizeof *memory);
    if (memory) {
        memory->use = *use;
        memory->device = ghost_current_device;
        memory->sent = calloc((size_t)use->ranks, sizeof *memory->sent);
        memory->received = calloc((size_t)use->ranks, sizeof *memory->received);
        resize(memory);
    }
    return memory;
}

void communicator_memory_end(struct communicator_memory *memory)
{
    if (memory) {
        hold(memory, 0);
        free(memory->sent);
        free(memory->received);
    }
    free(memory);
}

void communicator_reduces(struct communicator_memory *memory)
{
    if (memory && !__atomic_exchange_n(&memory->use.all_reduces, 1, __ATOMIC_RELAXED))
        resize(memory);
}

void communicator_collects(struct communicator_memory *memory)
{
    if (memory && !__atomic_exchange_n(&memory->use.collectives, 1, __ATOMIC_RELAXED))
        resize(memory);
}

/* Mark ranks as met, and count those that are new. NCCL only copies what a rank sends to itself. */
static void meet(struct communicator_memory *memory, bool *met, int *counted, int first, int count)
{
    const struct ghost_communicator *use = &memory->use;
    int before = *counted;
    for (int rank = first; met && rank < first + count; rank++)
        if (rank >= 0 && rank < use->ranks && rank != use->rank && !met[rank]) {
            met[rank] = true;
            ++*counted;
        }
    if (*counted > before)
        resize(memory);
}

void communicator_sends(struct communicator_memory *memory, int first, int count)
{
    if (memory)
        meet(memory, memory->sent, &memory->use.sends, first, count);
}

void communicator_receives(struct communicator_memory *memory, int first, int count)
{
    if (memory)
        meet(memory, memory->received, &memory->use.receives, first, count);
}
