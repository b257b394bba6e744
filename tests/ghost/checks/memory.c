/* Capacity, pools, virtual memory. */
#include "checks.h"

/* ---- Memory ---------------------------------------------------------------------------------- */

void device_capacity(void)
{
    configure(GIB);
    void *kept = allocated(600 * MIB), *refused = &refused;
    CHECK(ghost_counter("used") == 600 * MIB);
    CHECK(cudaMalloc(&refused, 600 * MIB) == OUT_OF_MEMORY);
    CHECK(refused == NULL);
    CHECK(ghost_counter("used") == 600 * MIB && ghost_counter("used_peak") == 600 * MIB);
    CHECK(cudaGetLastError() == OUT_OF_MEMORY && cudaGetLastError() == SUCCESS);
    CHECK(cudaMalloc(&refused, SIZE_MAX) == OUT_OF_MEMORY);
    size_t left, total;
    cudaMemGetInfo(&left, &total);
    CHECK(left == GIB - 600 * MIB && total == GIB);
    void *rest = allocated(GIB - 600 * MIB); /* to the last byte */
    cudaMemGetInfo(&left, &total);
    CHECK(left == 0);
    CHECK(cudaFree(kept) == SUCCESS && cudaFree(rest) == SUCCESS);
    CHECK(ghost_counter("used") == 0 && ghost_counter("used_peak") == GIB);
    CHECK(cudaFree(kept) == INVALID_VALUE);
    CHECK(cudaFree(NULL) == SUCCESS);
    CHECK(cudaMalloc(&kept, 0) == SUCCESS && kept == NULL);
}

void allocation_rounding(void)
{
    configure(GIB);
    const uint64_t sizes[][2] = {{1, 512},       {512, 512},         {513, 1024},           {MIB - 1, MIB},
                                 {MIB, 2 * MIB}, {2 * MIB, 2 * MIB}, {2 * MIB + 1, 4 * MIB}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *pointer = allocated(sizes[i][0]);
        CHECK((uint64_t)pointer % 512 == 0);
        CHECK(ghost_counter("used") == sizes[i][1]);
        cudaFree(pointer);
    }
}

void many_allocations(void)
{
    enum { COUNT_ = 50000 };
    static void *pointers[COUNT_];
    configure(1024 * GIB);
    srand(1);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < COUNT_; i++)
            pointers[i] = allocated((size_t)(rand() % 5000 + 1) * 512);
        for (int i = COUNT_ - 1; i > 0; i--) { /* free in random order */
            int other = rand() % (i + 1);
            void *swap = pointers[i];
            pointers[i] = pointers[other];
            pointers[other] = swap;
        }
        for (int i = 0; i < COUNT_; i++) {
            uint64_t start;
            size_t size;
            CHECK(cuMemGetAddressRange_v2(&start, &size, (uint64_t)pointers[i] + 511) == SUCCESS);
            CHECK(start == (uint64_t)pointers[i]);
            CHECK(cudaFree(pointers[i]) == SUCCESS);
        }
        CHECK(ghost_counter("used") == 0);
    }
    CHECK(ghost_counter("mallocs") == 3 * COUNT_ && ghost_counter("frees") == 3 * COUNT_);
}

void configuring(void)
{
    struct ghost_device small = device(GIB);
    CHECK(ghost_configure(&small, 0, 0) == GHOST_BAD_ARGUMENT);
    CHECK(ghost_configure(&small, 17, 0) == GHOST_BAD_ARGUMENT);
    CHECK(ghost_configure(&small, 1, GIB + 1) == GHOST_BAD_ARGUMENT);
    CHECK(ghost_configure(&small, 1, 512 * MIB) == 0);
    void *refused;
    CHECK(cudaMalloc(&refused, 513 * MIB) == OUT_OF_MEMORY);
    void *kept = allocated(512 * MIB);
    CHECK(ghost_configure(&small, 1, 0) == GHOST_IN_USE);
    ghost_set_capacity(2 * GIB);
    void *more = allocated(GIB);
    CHECK(ghost_counter("capacity") == 2 * GIB && ghost_counter("used") == 2 * GIB);
    ghost_change_others(-100 * (int64_t)MIB);
    CHECK(ghost_counter("used") == 2 * GIB - 100 * MIB);
    ghost_change_others(-(int64_t)GIB); /* others can release only 412 MiB */
    CHECK(ghost_counter("used") == 1536 * MIB);
    ghost_change_others((int64_t)GIB);
    CHECK(cudaMalloc(&refused, 512) == OUT_OF_MEMORY);
    cudaFree(kept), cudaFree(more);
    CHECK(ghost_configure(&small, 2, 0) == 0);
    CHECK(cudaSetDevice(1) == SUCCESS && cudaSetDevice(2) == INVALID_DEVICE);
    void *on_second = allocated(GIB); /* each device has its own capacity */
    CHECK(cudaSetDevice(0) == SUCCESS);
    void *on_first = allocated(GIB);
    struct pointer_attributes known;
    cudaPointerGetAttributes(&known, on_second);
    CHECK(known.device == 1);
    cudaFree(on_first), cudaFree(on_second);
    CHECK(ghost_counter("nonsense") == 0);
    int value;
    CHECK(cudaDeviceGetAttribute(&value, 16, 0) == SUCCESS && value == ghost_spec.multiprocessors);
    CHECK(cudaDeviceGetAttribute(&value, 16, 7) == INVALID_DEVICE);
}

void memory_pools(void)
{
    enum { THRESHOLD = 4, RESERVED = 5, RESERVED_HIGH = 6, USED = 7, USED_HIGH = 8 };
    configure(GIB);
    void *pool, *first, *second;
    uint64_t value = 0, forever = UINT64_MAX;
    cudaDeviceGetDefaultMemPool(&pool, 0);
#define POOL(attribute) (cudaMemPoolGetAttribute(pool, attribute, &value), value)
    CHECK(cudaMallocAsync(&first, 3 * MIB + 1, NULL) == SUCCESS);
    CHECK(POOL(USED) == 3 * MIB + 512 && POOL(RESERVED) == 32 * MIB && ghost_counter("used") == 32 * MIB);
    CHECK(cudaMallocAsync(&second, 40 * MIB, NULL) == SUCCESS);
    CHECK(POOL(RESERVED) == 64 * MIB);
    CHECK(cudaFreeAsync(second, NULL) == SUCCESS);
    CHECK(POOL(RESERVED) == 64 * MIB && POOL(USED) == 3 * MIB + 512);
    CHECK(POOL(USED_HIGH) == 43 * MIB + 512 && POOL(RESERVED_HIGH) == 64 * MIB);
    cudaDeviceSynchronize(); /* the threshold is 0: free memory is released */
    CHECK(POOL(RESERVED) == 32 * MIB && ghost_counter("used") == 32 * MIB);
    cudaMemPoolSetAttribute(pool, THRESHOLD, &forever);
    CHECK(cudaFree(first) == SUCCESS); /* cudaFree works, too */
    cudaDeviceSynchronize();
    CHECK(POOL(USED) == 0 && POOL(RESERVED) == 32 * MIB);
    CHECK(cudaMallocAsync(&first, GIB - 10 * MIB, NULL) == SUCCESS);
    CHECK(cudaMallocAsync(&second, 11 * MIB, NULL) == OUT_OF_MEMORY);
    CHECK(POOL(USED) == GIB - 10 * MIB && POOL(RESERVED) == GIB);
    cudaFreeAsync(first, NULL);
    cudaMemPoolTrimTo(pool, 100 * MIB);
    CHECK(POOL(RESERVED) == 128 * MIB);
    cudaMemPoolTrimTo(pool, 0);
    CHECK(POOL(RESERVED) == 0 && ghost_counter("used") == 0);
    uint64_t reset = 0;
    cudaMemPoolSetAttribute(pool, USED_HIGH, &reset);
    CHECK(POOL(USED_HIGH) == 0);
}

void virtual_memory(void)
{
    configure(10 * MIB);
    const int on_first[8] = {1, 0, 1, 0}, on_third[8] = {1, 0, 1, 2};
    uint64_t range, other;
    void *piece, *second, *refused;
    CHECK(cuMemAddressReserve(&range, 100 * GIB, 0, 0, 0) == SUCCESS); /* costs no capacity */
    CHECK(cuMemAddressReserve(&other, 3, 0, 0, 0) == INVALID_VALUE);
    CHECK(cuMemCreate(&refused, MIB, on_first, 0) == INVALID_VALUE);     /* not a granule */
    CHECK(cuMemCreate(&refused, 2 * MIB, on_third, 0) == INVALID_VALUE); /* no such device */
    CHECK(cuMemCreate(&piece, 4 * MIB, on_first, 0) == SUCCESS);
    CHECK(cuMemCreate(&second, 6 * MIB, on_first, 0) == SUCCESS);
    CHECK(cuMemCreate(&refused, 2 * MIB, on_first, 0) == OUT_OF_MEMORY);
    CHECK(ghost_counter("used") == 10 * MIB);
    CHECK(cuMemMap(range, 4 * MIB, 0, piece, 0) == SUCCESS);
    CHECK(cuMemMap(range, 6 * MIB, 0, second, 0) == INVALID_VALUE);           /* taken */
    CHECK(cuMemMap(range + 4 * MIB, 8 * MIB, 0, second, 0) == INVALID_VALUE); /* longer than the piece */
    CHECK(cuMemMap(range + 4 * MIB, 6 * MIB, 0, second, 0) == SUCCESS);
    struct pointer_attributes known;
    cudaPointerGetAttributes(&known, (void *)(range + 9 * MIB));
    CHECK(known.type == 2 && known.device == 0);
    uint64_t start;
    size_t size;
    CHECK(cuMemGetAddressRange_v2(&start, &size, range + 9 * MIB) == SUCCESS);
    CHECK(start == range + 4 * MIB && size == 6 * MIB);
    CHECK(cuMemGetAddressRange_v2(&start, &size, range + 10 * MIB) != SUCCESS); /* past the last piece */
    CHECK(cuMemRelease(piece) == SUCCESS);
    CHECK(ghost_counter("used") == 10 * MIB); /* still mapped */
    CHECK(cuMemUnmap(range, 10 * MIB) == SUCCESS);
    CHECK(ghost_counter("used") == 6 * MIB); /* the second is not released */
    CHECK(cuMemRelease(second) == SUCCESS);
    CHECK(ghost_counter("used") == 0);
    CHECK(cuMemUnmap(range, 2 * MIB) == INVALID_VALUE);
    cudaPointerGetAttributes(&known, (void *)range);
    CHECK(known.type == 0);
    CHECK(cuMemAddressFree(range, GIB) == INVALID_VALUE);
    CHECK(cuMemAddressFree(range, 100 * GIB) == SUCCESS);
    CHECK(cuMemAddressReserve(&other, 100 * GIB, 0, 0, 0) == SUCCESS && other == range);
    cuMemAddressFree(other, 100 * GIB);
}

void stray_dereference(void)
{
    configure(GIB);
    volatile char *pointer = allocated(4096);
    pid_t child = fork();
    if (child == 0) {
        freopen("/dev/null", "w", stderr); /* the sanitizer reports the fault, as it should */
        _exit(*pointer);
    }
    int how;
    waitpid(child, &how, 0);
    CHECK(WIFSIGNALED(how) || WEXITSTATUS(how) != 0);
    cudaFree((void *)pointer);
}
