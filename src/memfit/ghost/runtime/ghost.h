/* The ghost: the part of the CUDA ABI that PyTorch's CUDA build calls, with no device behind it.
 *
 *   what PyTorch asks for            what the ghost does
 *   ------------------------------   ---------------------------------------------------------
 *   device memory (memory.c,         exact bookkeeping against a capacity; addresses lie in a
 *   virtual.c)                       reservation that faults when touched
 *   host memory (host.c)             ordinary host memory, so that it can be read and written
 *   copies, memsets (copies.c)       the host side only; device bytes are known while they can
 *                                    be known for certain, and are zeros otherwise
 *   streams, events (streams.c)      everything is finished at once, unless a test holds events
 *   kernels (kernels.c)              nothing, counted
 *   cuBLAS, cuDNN, cuFFT, NCCL ...   handles and sizes; no arithmetic
 *   properties (device.c)            those of the configured device
 *
 * A function here has the prototype of NVIDIA's headers, with every handle a `void *` and every
 * enumeration an `int`: on x86-64 both are passed and returned alike. Layouts that cross the
 * boundary are written out with their header and CUDA version, and tests/ghost/test_abi.py
 * compares them with the real headers where those are installed.
 *
 * Functions that PyTorch imports and that are not written here are made by memfit.ghost.build.runtime_library:
 * a plain stub that returns success, or, for the names in gaps.txt, a refusal that is recorded.
 *
 * CUDA_VERSION, CUDNN_VERSION and NCCL_VERSION are set by the builder to those that the installed
 * PyTorch was made for.
 */
#ifndef MEMFIT_GHOST_H
#define MEMFIT_GHOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

#define KIB ((uint64_t)1 << 10)
#define MIB ((uint64_t)1 << 20)
#define TIB ((uint64_t)1 << 40)
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

/* ---- The control interface: what memfit.ghost.load calls ------------------------------------- */

/* What the ghost says it is. Bytes unless named otherwise. */
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
    GHOST_OUT_OF_MEMORY = 4, /* `size` was asked for and refused */
};

/* One entry of the allocation log. */
struct ghost_event {
    int32_t action; /* enum ghost_action */
    int32_t device;
    uint64_t address; /* for GHOST_OUT_OF_MEMORY the bytes that were still free */
    uint64_t size;    /* bytes it takes of the device; as requested for GHOST_OUT_OF_MEMORY */
    uint64_t stream;  /* the handle; 0 for the default stream and for the synchronous calls */
    uint64_t label;   /* what this thread had set with ghost_set_label */
    int64_t time_us;  /* since the Unix epoch */
};

enum ghost_refusal { GHOST_BAD_ARGUMENT = 1, GHOST_IN_USE = 2, GHOST_NO_ADDRESSES = 3 };

/* Choose the device before anything is allocated, `in_use` bytes of it gone from the start (the
 * CUDA context, other processes). Returns 0 or a ghost_refusal: a bad argument, allocations are
 * live, or the address space is too small (`ulimit -v`). May be called again in a forked child. */
API int ghost_configure(const struct ghost_device *device, int count, uint64_t in_use);
/* used, used_peak (bytes of the current device, in_use included), capacity, mallocs, frees, maps,
 * launches, copies, library_calls, cudnn_calls. 0 for any other name. */
API uint64_t ghost_counter(const char *name);
API void ghost_set_capacity(uint64_t total);
/* Of what was in use from the start, so much of each device is this process's own context: NVML
 * counts it as held by the process. */
API void ghost_own(uint64_t bytes);
/* Another process on the card takes (or, negative, gives back) bytes of the current device. */
API void ghost_take(int64_t bytes);
/* While held, recorded events stay "not ready" until something synchronises or they are released. */
API void ghost_hold_events(int on);
API void ghost_answer_elapsed(float milliseconds);
/* Between the two, this thread's device-to-host copies of at most 8 bytes answer `value`, little
 * endian, saturated at the copy's width as a signed integer; those of 16 bytes, which is how Thrust's
 * searches end, say that it was found, at 0. */
API void ghost_answer_counts(uint64_t value);
API void ghost_answer_nothing(void);
/* 1 if this thread's last device-to-host copy was answered wholly from remembered bytes. */
API int ghost_last_read_known(void);
/* Names of known gaps that were called, one per line. Returns the bytes needed, the final 0
 * included; writes no more than `capacity`. */
API size_t ghost_gaps_reached(char *out, size_t capacity);
/* The log of cudaMalloc and its kin, for allocators that PyTorch keeps no history of. Returns the
 * number of entries; writes the first `capacity` of them. Turning it on starts it afresh. */
API void ghost_log_allocations(int on);
API size_t ghost_allocation_log(struct ghost_event *out, size_t capacity);
API void ghost_set_label(uint64_t label);

/* A use of memory that a library worked in: an allocation of that address and size, made under that label. */
struct ghost_space {
    uint64_t address, size, label;
};

/* One way for a library to do what it is asked: the bytes it works in, the number of its engine, and notes
 * on it as bits (cudnn_graph.h, cudnnBackendNumericalNote_t and cudnnBackendBehaviorNote_t). */
struct ghost_configuration {
    uint64_t workspace;
    int64_t engine;
    uint32_t numerical_notes, behavior_notes;
};

/* Who says what a library would choose. A question is a JSON object with a "kind"; the answer is at most
 * `room` configurations in the order of preference, and returns their number. Without an answerer there
 * is one and it takes 0 bytes, which is recorded as assumed. */
typedef int (*ghost_answerer)(const char *question, struct ghost_configuration *out, int room);
API void ghost_answer_with(ghost_answerer answer);
/* The uses of such memory so far. Returns their number; writes the first `capacity` of them. */
API size_t ghost_spaces(struct ghost_space *out, size_t capacity);

/* ---- Called by the generated stubs ----------------------------------------------------------- */

/* A library call that returns success: it may have written to the device. */
long ghost_stub_called(void);
/* A known gap was called: remember its name, which must stay where it is, and return `refusal`. */
API long ghost_gap_called(const char *name, long refusal);

/* A handle or descriptor that only ever goes back in, and how it is destroyed. */
#define OPAQUE(create, destroy)                                                                              \
    API status create(void **handle) { return ghost_new_handle(handle, 64); }                                \
    API status destroy(void *handle) { return ghost_end_handle(handle); }

/* ---- Shared state (state.c) ------------------------------------------------------------------ */

struct device_memory {
    uint64_t allocated; /* by this process */
    uint64_t others;    /* the CUDA context, other processes */
    uint64_t used_peak; /* of the two together */
    uint64_t own;       /* of `others`, what is this process's: its CUDA context */
};

struct counters {
    uint64_t mallocs, frees, maps, launches, copies, library_calls, cudnn_calls;
};

extern struct ghost_device ghost_spec;
extern int ghost_device_count;
extern struct device_memory ghost_devices[MAX_DEVICES];
extern struct counters ghost_counts;
extern _Thread_local int ghost_current_device;

/* One lock for all bookkeeping: the calls are far too short to contend, and fork needs only one. */
void ghost_lock(void);
void ghost_unlock(void);

/* Relaxed counting, safe from any thread without the lock. */
#define COUNT(counter) __atomic_fetch_add(&ghost_counts.counter, 1, __ATOMIC_RELAXED)

/* Record `error` as this thread's last error, as the runtime API does, and return it. */
status ghost_fail(status error);
/* A size or answer that is assumed rather than known was given: recorded like a gap. */
void ghost_assumed(const char *name);
/* Allocate a zeroed handle of `size` bytes into *out. */
status ghost_new_handle(void **out, size_t size);
/* Free a handle made by it. */
status ghost_end_handle(void *handle);
/* Bytes of one element. Source: library_types.h 13.0, cudaDataType. */
size_t data_type_width(int data_type);
int64_t ghost_now_us(void);

/* ---- Memory that libraries work in (spaces.c) ------------------------------------------------- */

/* Ask whoever answers; returns how many configurations were written, at most `room`. */
int ghost_ask(const char *question, struct ghost_configuration *out, int room);
/* A library was handed memory of a size it had named. */
void ghost_space_used(const void *address, uint64_t size);
/* memory.c: what this thread had set with ghost_set_label. */
uint64_t ghost_label(void);

/* The capacity of a device: bytes gone, take some (false: not there), give back; with the lock held. */
uint64_t capacity_used(int device);
bool capacity_take(int device, uint64_t bytes);
void capacity_give(int device, uint64_t bytes);

/* ---- Address to record (table.c) ------------------------------------------------------------- */

/* An open-addressing hash table from non-zero keys to pointers. */
struct table {
    struct table_slot {
        uint64_t key;
        void *value;
    } *slots;
    size_t capacity, length; /* capacity: a power of two, or 0 */
};

bool table_put(struct table *table, uint64_t key, void *value); /* false: no host memory */
void *table_get(const struct table *table, uint64_t key);
void *table_remove(struct table *table, uint64_t key);

/* ---- Device addresses (addresses.c) ---------------------------------------------------------- */

enum arena_kind { ARENA_MALLOC, ARENA_VIRTUAL };

/* Whether an address lies in the ghost's reservation, that is, on a device. */
bool is_device_address(const void *pointer);
bool addresses_reserved(void);
/* A naturally aligned slot of at least `size` bytes, or 0; with the lock held. */
uint64_t address_take(enum arena_kind arena, uint64_t size);
void address_give(enum arena_kind arena, uint64_t address, uint64_t size);

/* ---- What is known of device memory (copies.c) ----------------------------------------------- */

/* Something of unknown arguments ran on the device: nothing remembered can be trusted. */
void forget_everything(void);
/* The range was freed, unmapped or overwritten with bytes that are not remembered. */
void forget(uint64_t address, uint64_t size);
/* A device-to-device copy whose ranges are known (collectives over one rank). */
void copy_on_device(uint64_t to, uint64_t from, uint64_t size);
/* A library's result of `size` bytes at an address on either side: zeros on the host. */
void write_result(void *result, size_t size);

/* ---- Asked of other subjects ----------------------------------------------------------------- */

/* memory.c: the device of an address, or -1; the start and size of the allocation around it. */
int allocation_device(uint64_t address);
bool allocation_range(uint64_t address, uint64_t *start, uint64_t *size);
void pools_synchronized(void);
/* virtual.c: the same for mapped memory. */
int mapping_device(uint64_t address);
bool mapping_range(uint64_t address, uint64_t *start, uint64_t *size);
/* host.c: 0 unknown to CUDA, otherwise cudaMemoryType. */
int host_memory_type(const void *pointer);
bool free_managed(void *pointer); /* false: it is no managed memory, and was left alone */
/* streams.c */
bool any_capture(void);
void note_captured_node(const void *stream);
void everything_synchronized(void);

#endif
