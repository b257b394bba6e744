/* Copies and memsets: the host side is done; of device memory the bytes known for certain are remembered
 * (core/remembered_bytes.c).
 *
 * Copies issued while a graph is being captured have not happened yet: their destination becomes unknown.
 */
#include "core/ghost.h"

#include <string.h>

#define THRUST_FOUND 16 /* bytes of thrust::tuple<bool, long>: whether a search found, and where */

static _Thread_local bool answering;
static _Thread_local uint64_t answer;
static _Thread_local bool last_read_known;

API void ghost_answer_counts(uint64_t value)
{
    answering = true;
    answer = value;
}

API void ghost_stop_answering_counts(void) { answering = false; }

API int ghost_last_read_known(void) { return last_read_known; }

/* ---- The copies ------------------------------------------------------------------------------ */

void copy_on_device(uint64_t to, uint64_t from, uint64_t size)
{
    if (size > LONGEST_REMEMBERED || any_capture())
        forget(to, size);
    else
        remember_device_copy(to, from, size);
}

static void copy_to_device(uint64_t to, const void *from, uint64_t size)
{
    if (size > LONGEST_REMEMBERED || any_capture())
        forget(to, size);
    else
        remember_copy(to, from, size);
}

static void copy_to_host(unsigned char *to, uint64_t from, uint64_t size)
{
    last_read_known = false;
    zero_host_memory(to, size);
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
    last_read_known = recall_copy(to, from, size);
    if (!last_read_known)
        zero_host_memory(to, size); /* part of it may have been on record */
}

/* The addresses show the direction: device addresses are the ghost's own. */
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
    note_stream_work(stream);
    return copy(to, from, size);
}

API status cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                               void *stream)
{
    note_stream_work(stream);
    return copy(to, from, size);
}

API status cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                             size_t height, int kind, void *stream)
{
    note_stream_work(stream);
    if (width == 0 || height == 0)
        return SUCCESS;
    if (width > to_pitch || width > from_pitch)
        return ghost_fail(INVALID_VALUE);
    if (is_device_address(to) && width * height > LONGEST_REMEMBERED) {
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

/* A __device__ variable exists here only as its shadow on the host. */
ENTRY(cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind),
      COUNT(copies);
      forget_everything())

static status fill(void *to, int byte, uint64_t size)
{
    if (!is_device_address(to)) {
        memset(to, byte, size);
    } else if (any_capture()) {
        forget((uint64_t)to, size);
    } else {
        remember_fill((uint64_t)to, (unsigned char)byte, size);
    }
    return SUCCESS;
}

API status cudaMemset(void *to, int byte, size_t size) { return fill(to, byte, size); }

API status cudaMemsetAsync(void *to, int byte, size_t size, void *stream)
{
    note_stream_work(stream);
    return fill(to, byte, size);
}

/* ---- The driver's names for the same, as Triton and PyTorch's symmetric memory call them ----- */

CALL(cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream),
     cudaMemcpyAsync((void *)to, from, size, 0, stream))
ALSO(cuMemcpyDtoHAsync_v2, cuMemcpyHtoDAsync_v2)
CALL(cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size), copy((void *)to, from, size))
ALSO(cuMemcpyDtoH_v2, cuMemcpyHtoD_v2)

API status cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void *stream)
{
    unsigned char byte = (unsigned char)value;
    if (value == byte * 0x01010101u)
        return cudaMemsetAsync((void *)to, byte, count * sizeof value, stream);
    note_stream_work(stream);
    forget(to, count * sizeof value);
    return SUCCESS;
}
