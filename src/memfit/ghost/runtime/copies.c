/* Copies and memsets, and the bytes of device memory that are known for certain.
 *
 * No device memory exists, so a copy to the device stores nothing and a copy from it gives zeros,
 * except where the ghost can be certain of the bytes: a short copy from the host or a memset puts
 * them on record, and a copy back that lies wholly on record is answered.
 *
 * A kernel's arguments are opaque pointers to values of unknown type, so a launch may have written
 * anywhere: any launch, graph launch or library call wipes the record. That is the only sound
 * rule, and it costs little, because what scripts read back unchanged (sizes exchanged between
 * ranks, flags, constants just made) is read before the next launch. Freeing, unmapping and newer
 * copies wipe their own range. Copies issued while a graph is being captured have not happened
 * yet: their destination becomes unknown.
 *
 *   on record     address ->        [bytes]   [0 0 0 0 0 ...]      [bytes]
 *   cudaMemcpy    device to host      [known]  [known]   [zeros: partly off the record]
 */
#include "ghost.h"

#include <stdlib.h>
#include <string.h>

#define LONGEST (64 * KIB)   /* bytes of one remembered copy */
#define MOST_BYTES (4 * MIB) /* on record at once, uniform ranges not counted */
#define MOST_RANGES 1024
#define THRUST_FOUND 16 /* bytes of thrust::tuple<bool, long>: whether a search found, and where */

struct known {
    uint64_t start, size;
    uint64_t age;         /* when it was recorded: the oldest is dropped first */
    unsigned char *bytes; /* `size` of them, or NULL for a uniform range */
    unsigned char byte;   /* of a uniform range */
};

static struct known record[MOST_RANGES]; /* by start; they do not overlap */
static size_t record_length;             /* written with the lock, read without by launches */
static uint64_t record_bytes, clock_;

static _Thread_local bool answering;
static _Thread_local uint64_t answer;
static _Thread_local bool last_read_known;

/* ---- The record; with the lock held ---------------------------------------------------------- */

static void set_length(size_t length) { __atomic_store_n(&record_length, length, __ATOMIC_RELEASE); }

/* The index of the first range that ends after `address`. */
static size_t first_after(uint64_t address)
{
    size_t low = 0, high = record_length;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (record[middle].start + record[middle].size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void drop(size_t at)
{
    if (record[at].bytes)
        record_bytes -= record[at].size;
    free(record[at].bytes);
    memmove(&record[at], &record[at + 1], (record_length - at - 1) * sizeof *record);
    set_length(record_length - 1);
}

static void drop_oldest(void)
{
    size_t oldest = 0;
    for (size_t i = 1; i < record_length; i++)
        if (record[i].age < record[oldest].age)
            oldest = i;
    drop(oldest);
}

/* Put a range that overlaps nothing on record; `bytes` is copied, or NULL for a uniform range. */
static void insert(uint64_t start, uint64_t size, const unsigned char *bytes, unsigned char byte,
                   uint64_t age)
{
    struct known made = {start, size, age, NULL, byte};
    if (size == 0)
        return;
    if (bytes) {
        made.bytes = malloc(size);
        if (!made.bytes)
            return;
        memcpy(made.bytes, bytes, size);
        record_bytes += size;
    }
    if (record_length == MOST_RANGES)
        drop_oldest();
    size_t at = first_after(start);
    memmove(&record[at + 1], &record[at], (record_length - at) * sizeof *record);
    record[at] = made;
    set_length(record_length + 1);
    while (record_bytes > MOST_BYTES)
        drop_oldest();
}

/* Make [start, end) unknown, keeping what lies on either side of it. */
static void cut(uint64_t start, uint64_t end)
{
    for (;;) {
        size_t at = first_after(start);
        if (at == record_length || record[at].start >= end)
            return;
        struct known old = record[at];
        unsigned char *bytes = old.bytes;
        uint64_t old_end = old.start + old.size;
        if (bytes)
            record_bytes -= old.size;
        record[at].bytes = NULL; /* kept until its two sides are copied */
        drop(at);
        if (old.start < start)
            insert(old.start, start - old.start, bytes, old.byte, old.age);
        if (old_end > end)
            insert(end, old_end - end, bytes ? bytes + (end - old.start) : NULL, old.byte, old.age);
        free(bytes);
    }
}

/* Copy [start, start + size) into `out` if all of it is on record. */
static bool recall(uint64_t start, uint64_t size, unsigned char *out)
{
    uint64_t end = start + size, at = start;
    for (size_t i = first_after(start); at < end; i++) {
        if (i == record_length || record[i].start > at)
            return false;
        uint64_t until = record[i].start + record[i].size;
        uint64_t length = (until < end ? until : end) - at;
        if (record[i].bytes)
            memcpy(out + (at - start), record[i].bytes + (at - record[i].start), length);
        else
            memset(out + (at - start), record[i].byte, length);
        at += length;
    }
    return true;
}

static void remember(uint64_t start, uint64_t size, const unsigned char *bytes, unsigned char byte)
{
    cut(start, start + size);
    insert(start, size, bytes, byte, ++clock_);
}

/* ---- Asked by the other parts ---------------------------------------------------------------- */

void forget_everything(void)
{
    if (__atomic_load_n(&record_length, __ATOMIC_ACQUIRE) == 0)
        return;
    ghost_lock();
    for (size_t i = 0; i < record_length; i++)
        free(record[i].bytes);
    record_bytes = 0;
    set_length(0);
    ghost_unlock();
}

void forget(uint64_t address, uint64_t size)
{
    if (__atomic_load_n(&record_length, __ATOMIC_ACQUIRE) == 0)
        return;
    ghost_lock();
    cut(address, address + size);
    ghost_unlock();
}

void copy_on_device(uint64_t to, uint64_t from, uint64_t size)
{
    unsigned char bytes[LONGEST];
    if (size > LONGEST || any_capture()) {
        forget(to, size);
        return;
    }
    if (__atomic_load_n(&record_length, __ATOMIC_ACQUIRE) == 0)
        return;
    ghost_lock();
    if (recall(from, size, bytes))
        remember(to, size, bytes, 0);
    else
        cut(to, to + size);
    ghost_unlock();
}

void write_result(void *result, size_t size)
{
    forget_everything();
    if (!is_device_address(result))
        memset(result, 0, size);
}

API void ghost_answer_counts(uint64_t value)
{
    answering = true;
    answer = value;
}

API void ghost_answer_nothing(void) { answering = false; }

API int ghost_last_read_known(void) { return last_read_known; }

/* ---- The copies ------------------------------------------------------------------------------ */

static void copy_to_device(uint64_t to, const void *from, uint64_t size)
{
    if (size > LONGEST || any_capture()) {
        forget(to, size);
        return;
    }
    ghost_lock();
    remember(to, size, from, 0);
    ghost_unlock();
}

static void copy_to_host(unsigned char *to, uint64_t from, uint64_t size)
{
    last_read_known = false;
    memset(to, 0, size);
    if (answering && size <= sizeof answer) {
        uint64_t most = size == 0 ? 0 : UINT64_MAX >> (64 - 8 * size + 1);
        uint64_t value = answer < most ? answer : most;
        memcpy(to, &value, size); /* x86-64 is little endian, as the device is */
        return;
    }
    if (answering && size == THRUST_FOUND) {
        to[0] = true;
        return;
    }
    if (any_capture())
        return;
    ghost_lock();
    if (recall(from, size, to))
        last_read_known = true;
    else
        memset(to, 0, size); /* recall may have found some of it */
    ghost_unlock();
}

/* The addresses say which way it goes: device addresses are the ghost's own. */
static status copy(void *to, const void *from, uint64_t size)
{
    COUNT(copies);
    bool to_device = is_device_address(to), from_device = is_device_address(from);
    if (to_device && from_device)
        copy_on_device((uint64_t)to, (uint64_t)from, size);
    else if (to_device)
        copy_to_device((uint64_t)to, from, size);
    else if (from_device)
        copy_to_host(to, (uint64_t)from, size);
    else
        memmove(to, from, size);
    return SUCCESS;
}

API status cudaMemcpy(void *to, const void *from, size_t size, int kind) { return copy(to, from, size); }

API status cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream)
{
    note_captured_node(stream);
    return copy(to, from, size);
}

API status cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                               void *stream)
{
    note_captured_node(stream);
    return copy(to, from, size);
}

API status cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                             size_t height, int kind, void *stream)
{
    note_captured_node(stream);
    if (width == 0 || height == 0)
        return SUCCESS;
    if (width > to_pitch || width > from_pitch)
        return ghost_fail(INVALID_VALUE);
    if (is_device_address(to) && width * height > LONGEST) {
        COUNT(copies);
        forget((uint64_t)to, to_pitch * (height - 1) + width);
        return SUCCESS;
    }
    bool known = true;
    for (size_t row = 0; row < height; row++) {
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
        known = known && last_read_known;
    }
    last_read_known = known;
    return SUCCESS;
}

/* A __device__ variable has a shadow on the host, which is all there is of it here. */
API status cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind)
{
    COUNT(copies);
    forget_everything();
    return SUCCESS;
}

static status fill(void *to, int byte, uint64_t size)
{
    if (!is_device_address(to)) {
        memset(to, byte, size);
    } else if (any_capture()) {
        forget((uint64_t)to, size);
    } else {
        ghost_lock();
        remember((uint64_t)to, size, NULL, (unsigned char)byte);
        ghost_unlock();
    }
    return SUCCESS;
}

API status cudaMemset(void *to, int byte, size_t size) { return fill(to, byte, size); }

API status cudaMemsetAsync(void *to, int byte, size_t size, void *stream)
{
    note_captured_node(stream);
    return fill(to, byte, size);
}

/* ---- The driver's names for the same, as Triton and PyTorch's symmetric memory call them ----- */

API status cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream)
{
    return cudaMemcpyAsync((void *)to, from, size, 0, stream);
}

API status cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream)
{
    return cudaMemcpyAsync(to, (const void *)from, size, 0, stream);
}

API status cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size)
{
    return copy((void *)to, from, size);
}

API status cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
    return copy(to, (const void *)from, size);
}

API status cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void *stream)
{
    unsigned char byte = (unsigned char)value;
    if (value == byte * 0x01010101u)
        return cudaMemsetAsync((void *)to, byte, count * sizeof value, stream);
    note_captured_node(stream);
    forget(to, count * sizeof value);
    return SUCCESS;
}
