/* The ghost: the part of the CUDA ABI that PyTorch's CUDA build calls, with no device behind it.
 *
 *   what PyTorch asks for              what the ghost does
 *   --------------------------------   --------------------------------------------------------
 *   device memory                      exact bookkeeping against a capacity; addresses come from
 *   (cuda/device_memory.c,             a reservation that faults when touched
 *   memory_pools.c, virtual_memory.c)
 *   host memory                        ordinary host memory, so that it can be read and written
 *   (cuda/host_memory.c)
 *   copies, memsets (cuda/copies.c)    the host side only; device bytes are known while they can
 *                                      be known for certain, and are zeros otherwise
 *   streams, events, synchronization   everything is finished at once, unless a test holds events
 *   (cuda/streams.c, events.c,
 *   synchronization.c)
 *   kernels (cuda/kernels.c)           nothing, counted
 *   cuBLAS, cuDNN, cuFFT, NCCL ...     handles and sizes; no arithmetic
 *   (libraries/)
 *   properties                         those of the configured device
 *   (cuda/device_properties.c)
 *
 * core/ is the state that these share; cuda/ is CUDA's runtime and driver; libraries/ is all else that
 * NVIDIA ships.
 *
 * A function here has the prototype of NVIDIA's headers, with every handle a `void *` and every
 * enumeration an `int`: on x86-64 both are passed and returned alike. Layouts that cross the boundary are
 * written out with their header and CUDA version, and tests/ghost/test_abi.py compares them with the real
 * headers where those are installed.
 *
 * memfit.ghost.build.runtime_library generates the functions that PyTorch imports and that are not written
 * here: a plain stub that returns success, or, for the names in gaps.txt, a refusal that is recorded.
 *
 * The builder sets CUDA_VERSION, CUDNN_VERSION and NCCL_VERSION to those that the installed PyTorch was
 * built for.
 */
#ifndef MEMFIT_GHOST_H
#define MEMFIT_GHOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "units.h"

#ifndef CUDA_VERSION
#define CUDA_VERSION 13000 /* as in cuda.h: 1000 * major + 10 * minor */
#endif
#ifndef CUDNN_VERSION
#define CUDNN_VERSION 92400 /* as in cudnn_version.h: 10000 * major + 100 * minor + patch */
#endif
#ifndef NCCL_VERSION
#define NCCL_VERSION 23007 /* as in nccl.h: 10000 * major + 100 * minor + patch */
#endif

#define API __attribute__((visibility("default")))

#define MAX_DEVICES 16

/* Status values. Source: driver_types.h (cudaError), cuda.h (CUresult); the two agree below 100. */
typedef int status;
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_CONFIGURATION = 9,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    HOST_MEMORY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNMATCHED = 903,
};

/* Source: vector_types.h. Larger than 8 bytes, so it is passed in two registers. */
typedef struct {
    unsigned x, y, z;
} dim3;

/* ---- The control interface: what memfit.ghost.runtime_bindings calls -------------------------------------- */

/* The device that the ghost presents. Sizes are bytes unless named otherwise. */
struct ghost_device {
    char name[256];
    int major, minor;
    int multiprocessors;
    int threads_per_multiprocessor;
    int blocks_per_multiprocessor;
    uint64_t total_bytes; /* as cudaMemGetInfo reports it: the capacity */
    uint64_t shared_per_block;
    uint64_t shared_per_block_optin;
    uint64_t shared_per_multiprocessor;
    int l2_bytes;
    int memory_bus_bits;
    int clock_khz;
    int memory_clock_khz;
};

enum ghost_action {
    GHOST_MALLOC = 0,
    GHOST_FREE = 1,
    GHOST_MALLOC_ASYNC = 2,
    GHOST_FREE_ASYNC = 3,
    GHOST_OUT_OF_MEMORY = 4, /* `size` bytes were requested and refused */
};

/* One entry of the allocation log. */
struct ghost_event {
    int32_t action; /* enum ghost_action */
    int32_t device;
    uint64_t address; /* for GHOST_OUT_OF_MEMORY: the bytes that were still free */
    uint64_t size;    /* bytes taken from the device; for GHOST_OUT_OF_MEMORY: bytes requested */
    uint64_t stream;  /* the handle; 0 for the default stream and for the synchronous calls */
    uint64_t label;   /* what this thread had set with ghost_set_label */
    int64_t time_us;  /* since the Unix epoch */
};

enum ghost_refusal { GHOST_BAD_ARGUMENT = 1, GHOST_IN_USE = 2, GHOST_NO_ADDRESSES = 3 };

/* Set the device before anything is allocated, with `in_use` bytes taken from the start (the CUDA context,
 * other processes). Returns 0 or a ghost_refusal: a bad argument, live allocations, or too small an
 * address space (`ulimit -v`). May be called again in a forked child. */
API int ghost_configure(const struct ghost_device *device, int count, uint64_t in_use);
/* used, used_peak (bytes of the current device, in_use included), capacity, mallocs, frees, maps,
 * launches, copies, library_calls, cudnn_calls. 0 for any other name. */
API uint64_t ghost_counter(const char *name);
API void ghost_set_capacity(uint64_t total);
/* How much of the bytes in use from the start is this process's own context, per device: NVML reports it
 * as held by the process. */
API void ghost_set_context_bytes(uint64_t bytes);
/* Another process on the card takes (or, if negative, releases) bytes of the current device. */
API void ghost_change_others(int64_t bytes);
/* While held, recorded events stay "not ready" until something synchronizes or the hold ends. */
enum { HOLD_UNTIL_SYNCHRONIZED = 1, HOLD_UNTIL_AWAITED };
API void ghost_hold_events(int hold); /* 0: finish events when they are recorded */
/* Report this duration for every pair of events that this thread asks about; 0: the host's own time again. */
API void ghost_answer_elapsed(float milliseconds);
/* Between the two calls, this thread's device-to-host copies of at most 8 bytes return `value`, little
 * endian, saturated at the copy's width as a signed integer; those of 16 bytes, with which Thrust's
 * searches end, return "found, at 0". */
API void ghost_answer_counts(uint64_t value);
API void ghost_stop_answering_counts(void);
/* 1 if this thread's last device-to-host copy was answered entirely from remembered bytes. */
API int ghost_last_read_known(void);
/* Names of known gaps that were called, one per line. Returns the bytes needed, including the final 0;
 * writes at most `capacity`. */
API size_t ghost_gaps_reached(char *out, size_t capacity);
/* The log of cudaMalloc and its kin, for the allocators whose history PyTorch does not keep. Turning it on
 * empties it. ghost_allocation_log returns the number of entries and writes the first `capacity` of them. */
API void ghost_log_allocations(int on);
API size_t ghost_allocation_log(struct ghost_event *out, size_t capacity);
API void ghost_set_label(uint64_t label);

/* A use of a workspace by a library: an allocation with this address, size and label. With address 0, an
 * execution plan of cuDNN reported the size; with size 0 as well, a plan without a workspace ran. */
struct ghost_workspace_use {
    uint64_t address, size, label;
};

/* One way for a library to run an operation: the bytes of its workspace, the number of its engine, and notes
 * on it as bits (cudnn_graph.h, cudnnBackendNumericalNote_t and cudnnBackendBehaviorNote_t). */
struct ghost_configuration {
    uint64_t workspace;
    int64_t engine;
    uint32_t numerical_notes, behavior_notes;
};

/* The callback that decides what a library would choose. A question is a JSON object with a "kind"; the
 * callback writes at most `room` configurations in the order of preference and returns their number.
 * Without a callback there is one configuration of 0 bytes, which is recorded as assumed. */
typedef int (*ghost_answerer)(const char *question, struct ghost_configuration *out, int room);
API void ghost_set_answerer(ghost_answerer answer);
/* The uses of workspaces so far. Returns their number; writes the first `capacity` of them. */
API size_t ghost_workspace_uses(struct ghost_workspace_use *out, size_t capacity);

/* A communicator of NCCL and what has run on it: what the size of its buffers depends on. */
struct ghost_communicator {
    int ranks, rank;
    int min_ctas, max_ctas; /* of its ncclConfig_t; 0 if not set */
    int shares;             /* whether it was split off and uses its parent's connections */
    int all_reduces;        /* whether an all-reduce has run on it */
    int collectives;        /* whether another collective has */
    int sends, receives;    /* the ranks that this one has sent to, and received from */
};
/* Set the function that returns the bytes of device memory of a communicator. Without one they are 0. It is
 * called on the thread of the library call. */
typedef uint64_t (*ghost_communicator_sizes)(const struct ghost_communicator *communicator);
API void ghost_set_communicator_sizes(ghost_communicator_sizes function);
/* Return the most bytes that all communicators have held at one time. */
API uint64_t ghost_communicator_bytes(void);

/* Carry what the ranks of a communicator send each other, where they exist as processes; waits for them. Called on
 * the thread of the library call. Returns 0, or another number if a rank could not be reached.
 *
 *   group      the communicator's id; call: counts the exchanges of a communicator, alike on all ranks
 *   sent       `bytes` from this rank; NULL if they are not known
 *   received   `bytes` from each rank, in order; known: for each rank, whether they are */
typedef int (*ghost_exchange)(const char *group, uint64_t call, int ranks, int rank, const void *sent,
                              uint64_t bytes, void *received, unsigned char *known);
/* Without such a function there is one process, and the other ranks send what it sends. */
API void ghost_set_exchange(ghost_exchange function);

/* Carry a message from one rank of a communicator to another, where they exist as processes; `call` counts those
 * from the one to the other. `send` does not wait; bytes that are not known are NULL; returns 0, or another number
 * if it failed. `receive` waits for the message, and returns 1 if its bytes are known. */
typedef int (*ghost_message)(const char *group, uint64_t call, int from, int to, void *bytes, uint64_t size);
API void ghost_set_messages(ghost_message send, ghost_message receive);

/* ---- Called by the generated stubs ----------------------------------------------------------- */

/* A library call that returns success: it may have written to the device. */
long ghost_stub_called(void);
/* A known gap was called: record its name, a string that must stay valid, and return `refusal`. */
API long ghost_gap_called(const char *name, long refusal);

/* ---- How functions of the ABI are written ----------------------------------------------------- */

/* A function that has one effect and always succeeds. */
#define ENTRY(prototype, ...)                                                                                \
    API status prototype                                                                                     \
    {                                                                                                        \
        __VA_ARGS__;                                                                                         \
        return SUCCESS;                                                                                      \
    }

/* A function that returns what an expression is, such as the status of another function. */
#define CALL(prototype, expression)                                                                          \
    API status prototype { return expression; }

/* A second name of a function in the same file; its arguments are passed alike. */
#define ALSO(name, function)                                                                                 \
    extern __typeof__(function) name __attribute__((alias(#function), visibility("default")));

/* A handle or descriptor of a type, all zeros, and how it is destroyed. */
#define HANDLE(create, destroy, type)                                                                        \
    API status create(void **handle) { return ghost_new_handle(handle, sizeof(type)); }                      \
    ENTRY(destroy(void *handle), free(handle))

/* One that is only passed back in. */
#define OPAQUE(create, destroy) HANDLE(create, destroy, char[64])

/* ---- Shared state (core/state.c) ------------------------------------------------------------- */

struct device_memory {
    uint64_t allocated; /* by this process */
    uint64_t others;    /* the CUDA context, other processes */
    uint64_t used_peak; /* of the two together */
    uint64_t own;       /* the part of `others` that is this process's: its CUDA context */
};

struct counters {
    uint64_t mallocs, frees, maps, launches, copies, library_calls, cudnn_calls, waits, replays;
};

extern struct ghost_device ghost_spec;
extern int ghost_device_count;
extern struct device_memory ghost_devices[MAX_DEVICES];
extern struct counters ghost_counts;
extern _Thread_local int ghost_current_device;

/* One lock for all bookkeeping: the calls are far too short to contend, and fork needs only one. */
void ghost_lock(void);
void ghost_unlock(void);
static inline void unlock_at_end(const bool *held) { ghost_unlock(); }
/* Hold the lock until the end of the block. */
#define HOLD_LOCK const bool lock_held __attribute__((cleanup(unlock_at_end))) = (ghost_lock(), true)

/* The capacity of a device: bytes used, take some (false: not enough left), release some; with the lock
 * held. */
uint64_t capacity_used(int device);
bool capacity_take(int device, uint64_t bytes);
void capacity_release(int device, uint64_t bytes);

/* Relaxed counting, safe from any thread without the lock. */
#define COUNT(counter) __atomic_fetch_add(&ghost_counts.counter, 1, __ATOMIC_RELAXED)

/* Allocate a zeroed handle of `size` bytes into *out; free() ends it. */
status ghost_new_handle(void **out, size_t size);
/* Bytes of one element. Source: library_types.h 13.0, cudaDataType. */
size_t data_type_width(int data_type);
int64_t ghost_now_us(void);

/* ---- Workspaces (libraries/workspaces.c) ----------------------------------------------------- */

/* Ask the answerer; returns how many configurations were written, at most `room`. */
int ghost_ask(const char *question, struct ghost_configuration *out, int room);
/* A library was passed a workspace of the size that it had reported. */
void ghost_workspace_used(const void *address, uint64_t size);
/* An execution plan of cuDNN reports the size of its workspace, or runs without one (0 bytes). */
void ghost_workspace_reported(uint64_t size);

/* ---- Device addresses (core/addresses.c) ----------------------------------------------------- */

enum arena_kind { ARENA_MALLOC, ARENA_VIRTUAL };

/* Whether an address is in the ghost's reservation, that is, on a device. */
bool is_device_address(const void *pointer);
bool addresses_reserved(void);
/* A naturally aligned slot of at least `size` bytes, or 0; with the lock held. */
uint64_t address_take(enum arena_kind arena, uint64_t size);
void address_release(enum arena_kind arena, uint64_t address, uint64_t size);

/* ---- Bytes of device memory that are known (core/remembered_bytes.c) ------------------------- */

#define LONGEST_REMEMBERED (64 * KIB) /* bytes of one copy */

/* Something with unknown arguments ran on the device: nothing remembered can be trusted. */
void forget_everything(void);
/* The range was freed, unmapped or overwritten with bytes that are not remembered. */
void forget(uint64_t address, uint64_t size);
/* A copy from the host, a memset, and a copy within the device; at most LONGEST_REMEMBERED bytes but for a
 * memset. */
void remember_copy(uint64_t to, const void *from, uint64_t size);
void remember_fill(uint64_t to, unsigned char byte, uint64_t size);
void remember_device_copy(uint64_t to, uint64_t from, uint64_t size);
/* Another rank sends these bytes; recall_copy waits for them. At most LONGEST_REMEMBERED bytes. */
struct message {
    char group[128];
    uint64_t call;
    int from, to;
};
void remember_message(uint64_t to, uint64_t size, const struct message *message);
/* libraries/rank_exchange.c: wait for a message of another rank; return whether its bytes are known. */
bool receive_message(const struct message *message, void *received, uint64_t bytes);
/* Copy a range to the host; false if not all of it is on record, and then `to` may be partly written. */
bool recall_copy(void *to, uint64_t from, uint64_t size);
/* A library's result of `size` bytes at an address on either side: zeros on the host. */
void write_result(void *result, size_t size);

/* ---- Gaps and assumptions (core/gaps.c) ------------------------------------------------------ */

/* Record, like a gap, that a size or answer was assumed rather than known. */
void ghost_assumed(const char *name);

/* ---- The allocation log (core/allocation_log.c); with the lock held -------------------------- */

void log_allocation(enum ghost_action action, int device, uint64_t address, uint64_t size,
                    const void *stream);
/* The label that this thread set with ghost_set_label; needs no lock. */
uint64_t ghost_label(void);

/* ---- What the files of cuda/ offer to others ------------------------------------------------- */

/* errors.c: record an error as this thread's last, as the runtime API does; return the status. */
status ghost_fail(status error);

struct address_range {
    uint64_t start, size;
    int device;
};

/* device_memory.c: the allocation around an address; false: none is. */
bool allocation_around(uint64_t address, struct address_range *range);

/* fat_binaries.c: the architecture that the device runs a kernel in, named by its host function: 86 for compute
 * capability 8.6. */
int kernel_architecture(const void *function);

/* memory_pools.c: a device's pool takes (false: not enough left) and releases bytes; bytes that it has
 * reserved and not given out; all with the lock held. */
bool pool_take(int device, uint64_t bytes);
void pool_release(int device, uint64_t bytes);
uint64_t pool_idle_bytes(int device);
/* The device was synchronized: release what the pools reserve above their thresholds. */
void trim_pools_to_threshold(void);

/* virtual_memory.c: the same as for allocations, for mapped memory. */
bool mapping_around(uint64_t address, struct address_range *range);

/* host_memory.c. Source of the types: driver_types.h, cudaMemoryType. */
enum { UNREGISTERED = 0, HOST = 1, DEVICE = 2, MANAGED = 3 };
/* The type of an address that is not the ghost's; its device is written if CUDA knows the address. */
int host_memory_type(const void *pointer, int *device);
void zero_host_memory(unsigned char *to, uint64_t size);
bool free_managed(void *pointer); /* false: it is not managed memory, and was left alone */

/* copies.c: a device-to-device copy whose ranges are known (collectives over one rank). */
void copy_on_device(uint64_t to, uint64_t from, uint64_t size);

/* stream_captures.c: whether any stream is being captured; work was issued on a stream: a node of its capture, if
 * there is one. */
bool any_capture(void);
void note_stream_work(const void *stream);

/* synchronization.c */
void synchronize_everything(void);
uint64_t take_ticket(void); /* of an event that is recorded now; 0 unless events are held */
bool ticket_is_finished(const void *stream, uint64_t ticket);
void stream_waits(const void *waiter, const void *stream, uint64_t ticket);
void host_waits(const void *stream, uint64_t ticket);

static inline uint64_t round_up(uint64_t size, uint64_t multiple)
{
    return (size + multiple - 1) / multiple * multiple;
}

#endif
