/* Checks of the ghost runtime from C, one per subject, named on the command line.
 *
 * test_runtime.py compiles this with the runtime's own sources, under the address and
 * undefined-behaviour sanitizers, and runs each check in a process of its own.
 */
#include "ghost.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define GIB ((uint64_t)1 << 30)
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                          \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* What is called here, with the prototypes PyTorch sees. */
status cudaMalloc(void **, size_t), cudaFree(void *), cudaMallocAsync(void **, size_t, void *);
status cudaFreeAsync(void *, void *), cudaMemGetInfo(size_t *, size_t *), cudaGetLastError(void);
status cudaMemcpy(void *, const void *, size_t, int), cudaMemset(void *, int, size_t);
status cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, void *);
status cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, void *);
status cudaDeviceGetDefaultMemPool(void **, int), cudaMemPoolGetAttribute(void *, int, void *);
status cudaMemPoolSetAttribute(void *, int, void *), cudaMemPoolTrimTo(void *, size_t);
status cudaDeviceSynchronize(void), cudaSetDevice(int), cudaGetDevice(int *);
status cudaHostAlloc(void **, size_t, unsigned), cudaFreeHost(void *),
    cudaHostRegister(void *, size_t, unsigned);
status cudaHostUnregister(void *), cudaMallocManaged(void **, size_t, unsigned);
status cudaStreamCreateWithFlags(void **, unsigned), cudaStreamDestroy(void *),
    cudaStreamWaitEvent(void *, void *, unsigned);
status cudaEventCreateWithFlags(void **, unsigned), cudaEventRecord(void *, void *), cudaEventQuery(void *);
status cudaEventDestroy(void *), cudaEventSynchronize(void *), cudaEventElapsedTime(float *, void *, void *);
status cudaStreamBeginCapture(void *, int), cudaStreamEndCapture(void *, void **);
status cudaStreamIsCapturing(void *, int *), cudaGraphGetNodes(void *, void **, size_t *);
status cudaStreamGetCaptureInfo_v3(void *, int *, unsigned long long *, void **, const void **, const void **,
                                   size_t *);
status cudaGraphInstantiateWithFlags(void **, void *, unsigned long long), cudaGraphDestroy(void *);
status cudaGraphExecDestroy(void *), cudaGraphLaunch(void *, void *);
status cudaUserObjectCreate(void **, void *, void (*)(void *), unsigned, unsigned);
status cudaGraphRetainUserObject(void *, void *, unsigned, unsigned);
status cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, unsigned long long),
    cuMemAddressFree(uint64_t, size_t);
status cuMemCreate(void **, size_t, const void *, unsigned long long), cuMemRelease(void *);
status cuMemMap(uint64_t, size_t, size_t, void *, unsigned long long), cuMemUnmap(uint64_t, size_t);
status cuMemGetAddressRange_v2(uint64_t *, size_t *, uint64_t);
status cudaDeviceGetAttribute(int *, int, int);
status cudnnCreateTensorDescriptor(void **), cudnnDestroyTensorDescriptor(void *);
status cudnnSetTensorNdDescriptor(void *, int, int, const int *, const int *);
status cudnnGetTensorNdDescriptor(const void *, int, int *, int *, int *, int *);
status cublasSdot_v2(void *, int, const void *, int, const void *, int, float *);
struct nccl_id {
    char bytes[128];
};
status ncclGetUniqueId(struct nccl_id *), ncclCommInitRank(void **, int, struct nccl_id, int),
    ncclCommDestroy(void *);
status ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
status ncclBroadcast(const void *, void *, size_t, int, int, void *, void *);

struct pointer_attributes {
    int type, device;
    void *device_pointer, *host_pointer;
    long reserved[8];
};
status cudaPointerGetAttributes(struct pointer_attributes *, const void *);

static struct ghost_device device(uint64_t total)
{
    struct ghost_device made = ghost_spec;
    strcpy(made.name, "a test's device");
    made.total_bytes = total;
    return made;
}

static void configure(uint64_t total)
{
    struct ghost_device made = device(total);
    CHECK(ghost_configure(&made, 2, 0) == 0);
}

static void *allocated(size_t size)
{
    void *pointer;
    CHECK(cudaMalloc(&pointer, size) == SUCCESS);
    return pointer;
}

static void launch(void)
{
    CHECK(cudaLaunchKernel("k", (dim3){1, 1, 1}, (dim3){1, 1, 1}, NULL, 0, NULL) == SUCCESS);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static void capacity(void)
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

static void rounding(void)
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

static void many(void)
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

static void configuring(void)
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
    ghost_take(-100 * (int64_t)MIB);
    CHECK(ghost_counter("used") == 2 * GIB - 100 * MIB);
    ghost_take(-(int64_t)GIB); /* others have no more than 412 MiB to give back */
    CHECK(ghost_counter("used") == 1536 * MIB);
    ghost_take((int64_t)GIB);
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

static void pools(void)
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
    cudaDeviceSynchronize(); /* the threshold is 0: what is free goes back */
    CHECK(POOL(RESERVED) == 32 * MIB && ghost_counter("used") == 32 * MIB);
    cudaMemPoolSetAttribute(pool, THRESHOLD, &forever);
    CHECK(cudaFree(first) == SUCCESS); /* cudaFree serves, too */
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

static void virtual_memory(void)
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

static void stray_dereference(void)
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

/* ---- Remembered bytes ------------------------------------------------------------------------ */

static unsigned char host[256 * 1024];

static int read_back(void *from, size_t size)
{
    memset(host, 0xee, sizeof host);
    CHECK(cudaMemcpy(host, from, size, 2) == SUCCESS);
    return ghost_last_read_known();
}

static void remembered(void)
{
    configure(GIB);
    char *memory = allocated(8 * MIB);
    const char text[] = "0123456789abcdef";
    CHECK(!read_back(memory, 16) && host[0] == 0 && host[15] == 0 && host[16] == 0xee);

    cudaMemcpy(memory + 100, text, 16, 1);
    CHECK(read_back(memory + 100, 16) && memcmp(host, text, 16) == 0);
    CHECK(read_back(memory + 104, 4) && memcmp(host, "4567", 4) == 0);
    CHECK(!read_back(memory + 99, 16) && host[1] == 0); /* one byte off: zeros, all of it */
    CHECK(!read_back(memory + 101, 16) && host[0] == 0);

    cudaMemset(memory + 116, 7, 4 * MIB); /* adjacent, of any size */
    CHECK(read_back(memory + 110, 10) && memcmp(host, "abcdef\7\7\7\7", 10) == 0);
    CHECK(read_back(memory + 116 + 4 * MIB - 5, 5) && host[4] == 7);
    CHECK(!read_back(memory + 116 + 4 * MIB - 5, 6));

    cudaMemcpy(memory + 200, memory + 100, 16, 3); /* on the device */
    CHECK(read_back(memory + 198, 20) && memcmp(host,
                                                "\7\7"
                                                "0123456789abcdef"
                                                "\7\7",
                                                20) == 0);
    cudaMemcpy(memory + 210, memory + 7 * MIB, 4, 3); /* from where nothing is known */
    CHECK(!read_back(memory + 208, 4) && read_back(memory + 200, 10) && read_back(memory + 214, 30));

    cudaMemcpy(memory, host, sizeof host, 1); /* too long to be remembered */
    CHECK(!read_back(memory + 100, 16) && !read_back(memory + sizeof host - 1, 1));
    CHECK(read_back(memory + sizeof host, 1));
    cudaFree(memory);
}

static void launches_forget(void)
{
    configure(GIB);
    char *memory = allocated(MIB);
    float result = 1;
    cudaMemset(memory, 3, 64);
    CHECK(read_back(memory, 64));
    launch();
    CHECK(!read_back(memory, 64) && host[0] == 0);

    cudaMemset(memory, 3, 64);
    ghost_stub_called();
    CHECK(!read_back(memory, 64));

    cudaMemset(memory, 3, 64);
    CHECK(cublasSdot_v2(NULL, 1, memory, 1, memory, 1, (float *)memory) == SUCCESS);
    CHECK(!read_back(memory, 64));
    CHECK(cublasSdot_v2(NULL, 1, memory, 1, memory, 1, &result) == SUCCESS && result == 0);
    cudaFree(memory);
}

static void address_reuse(void)
{
    configure(GIB);
    void *memory = allocated(4096);
    cudaMemset(memory, 3, 64);
    cudaFree(memory);
    void *again = allocated(4096);
    CHECK(again == memory); /* otherwise this shows nothing */
    CHECK(!read_back(again, 64) && host[0] == 0);
    cudaFree(again);

    const int on_first[8] = {1, 0, 1, 0};
    uint64_t range;
    void *piece;
    cuMemAddressReserve(&range, 2 * MIB, 0, 0, 0);
    cuMemCreate(&piece, 2 * MIB, on_first, 0);
    cuMemMap(range, 2 * MIB, 0, piece, 0);
    cudaMemset((void *)range, 3, 64);
    CHECK(read_back((void *)range, 64));
    cuMemUnmap(range, 2 * MIB);
    cuMemMap(range, 2 * MIB, 0, piece, 0);
    CHECK(!read_back((void *)range, 64));
    cuMemUnmap(range, 2 * MIB), cuMemRelease(piece), cuMemAddressFree(range, 2 * MIB);
}

/* Random copies, memsets and reads against a referee that keeps one byte and one flag per address. */
static void against_a_referee(void)
{
    enum { SPACE = 300 };
    unsigned char value[SPACE] = {0}, source[SPACE], wanted[SPACE];
    bool known[SPACE] = {false};
    configure(GIB);
    char *memory = allocated(4096);
    srand(7);
    for (int turn = 0; turn < 200000; turn++) {
        int start = rand() % SPACE, size = rand() % (SPACE - start) + 1;
        int to = rand() % (SPACE - size + 1);
        switch (rand() % 8) {
        case 0:
        case 1:
            for (int i = 0; i < size; i++)
                value[start + i] = source[i] = (unsigned char)rand(), known[start + i] = true;
            cudaMemcpy(memory + start, source, (size_t)size, 1);
            break;
        case 2:
            memset(value + start, turn & 0xff, (size_t)size);
            memset(known + start, true, (size_t)size);
            cudaMemset(memory + start, turn & 0xff, (size_t)size);
            break;
        case 3: { /* on the device: known only if all of the source is */
            bool all = true;
            for (int i = 0; i < size; i++)
                all = all && known[start + i];
            memmove(value + to, value + start, (size_t)size);
            memset(known + to, all, (size_t)size);
            cudaMemcpy(memory + to, memory + start, (size_t)size, 3);
            break;
        }
        case 4:
            if (rand() % 50 == 0) {
                memset(known, false, sizeof known);
                launch();
            }
            break;
        default: {
            bool all = true;
            for (int i = 0; i < size; i++)
                all = all && known[start + i];
            for (int i = 0; i < size; i++)
                wanted[i] = all ? value[start + i] : 0;
            CHECK(read_back(memory + start, (size_t)size) == all);
            CHECK(memcmp(host, wanted, (size_t)size) == 0);
        }
        }
    }
    cudaFree(memory);
}

/* However much is copied, what is on record stays bounded, and what was dropped reads as unknown. */
static void bounded(void)
{
    configure(GIB);
    char *memory = allocated(512 * MIB);
    memset(host, 1, 4096);
    for (int i = 0; i < 5000; i++)
        cudaMemcpy(memory + i * 8192, host, 4096, 1);
    int kept = 0;
    for (int i = 0; i < 5000; i++)
        kept += read_back(memory + i * 8192, 4096);
    CHECK(kept == 1024);                                                      /* 4 MiB of 4 KiB */
    CHECK(read_back(memory + 4999 * 8192, 4096) && !read_back(memory, 4096)); /* the newest */
    launch();
    for (int i = 0; i < 100; i++)
        cudaMemcpy(memory + i * 65536, host, 65536, 1);
    for (kept = 0; read_back(memory + (99 - kept) * 65536, 65536); kept++)
        ;
    CHECK(kept == 64); /* 4 MiB of 64 KiB */
    cudaFree(memory);
}

static void strided(void)
{
    configure(GIB);
    char *memory = allocated(4 * MIB);
    unsigned char rows[4][8];
    memset(rows, 5, sizeof rows);
    CHECK(cudaMemcpy2DAsync(memory, 100, rows, 8, 8, 4, 1, NULL) == SUCCESS);
    CHECK(read_back(memory + 300, 8) && host[7] == 5 && !read_back(memory + 8, 1));
    memset(rows, 0, sizeof rows);
    CHECK(cudaMemcpy2DAsync(rows, 8, memory, 100, 8, 4, 2, NULL) == SUCCESS && ghost_last_read_known());
    CHECK(rows[3][7] == 5);
    CHECK(cudaMemcpy2DAsync(memory, 4, rows, 8, 8, 4, 1, NULL) == INVALID_VALUE);
    CHECK(cudaMemcpy2DAsync(memory, 100000, host, 10000, 10000, 20, 1, NULL) == SUCCESS); /* long: forgets */
    CHECK(!read_back(memory + 300, 8));
    cudaFree(memory);
}

static void counts(void)
{
    configure(GIB);
    char *memory = allocated(4096);
    cudaMemset(memory, 9, 64);
    ghost_answer_counts(1000);
    const struct {
        size_t width;
        int64_t wanted;
    } cases[] = {{1, 127}, {2, 1000}, {4, 1000}, {8, 1000}};
    for (size_t i = 0; i < 4; i++) {
        int64_t got = 0;
        cudaMemcpy(&got, memory, cases[i].width, 2);
        CHECK(got == cases[i].wanted && !ghost_last_read_known());
    }
    ghost_answer_counts(UINT64_MAX);
    int64_t longest = 0;
    int32_t shorter = 0;
    cudaMemcpy(&longest, memory, 8, 2);
    cudaMemcpy(&shorter, memory, 4, 2);
    CHECK(longest == INT64_MAX && shorter == INT32_MAX);
    CHECK(read_back(memory, 9) && host[8] == 9); /* longer than a count */
    ghost_answer_nothing();
    CHECK(read_back(memory, 8) && host[0] == 9);
    cudaFree(memory);
}

/* ---- Host memory ----------------------------------------------------------------------------- */

static int type_of(const void *pointer)
{
    struct pointer_attributes known;
    CHECK(cudaPointerGetAttributes(&known, pointer) == SUCCESS);
    return known.type;
}

static void pointers(void)
{
    configure(GIB);
    char *pinned, *managed, plain[100], *memory = allocated(3000);
    CHECK(cudaHostAlloc((void **)&pinned, 10000, 0) == SUCCESS);
    CHECK(cudaMallocManaged((void **)&managed, 100, 1) == SUCCESS);
    pinned[9999] = managed[99] = 1; /* both are real */
    CHECK(type_of(pinned) == 1 && type_of(pinned + 9999) == 1 && type_of(pinned - 1) == 0 &&
          type_of(pinned + 10000) == 0);
    CHECK(type_of(managed + 50) == 3 && type_of(plain) == 0);
    CHECK(type_of(memory) == 2 && type_of(memory + 2999) == 2 && type_of(memory + 4096) == 0);

    char *part = plain + 20;
    CHECK(cudaHostRegister(part, 50, 0) == SUCCESS && type_of(part + 49) == 1 && type_of(part + 50) == 0);
    CHECK(cudaHostRegister(part + 30, 10, 0) == HOST_MEMORY_REGISTERED);
    CHECK(cudaHostRegister(part - 10, 20, 0) == HOST_MEMORY_REGISTERED);
    CHECK(cudaHostRegister(part - 10, 10, 0) == SUCCESS && cudaHostUnregister(part - 10) == SUCCESS);
    CHECK(cudaFreeHost(part) == INVALID_VALUE); /* registered, not made here */
    CHECK(cudaHostUnregister(part) == SUCCESS && type_of(part) == 0);
    CHECK(cudaHostUnregister(part) == HOST_MEMORY_NOT_REGISTERED);
    CHECK(cudaHostUnregister(pinned) == HOST_MEMORY_NOT_REGISTERED);

    CHECK(cudaFreeHost(pinned) == SUCCESS && cudaFreeHost(managed) == SUCCESS &&
          cudaFreeHost(NULL) == SUCCESS);
    CHECK(cudaFree(memory) == SUCCESS && type_of(memory) == 0);
    CHECK(ghost_counter("used") == 0);
}

/* ---- Streams, events, graphs ----------------------------------------------------------------- */

static void held_events(void)
{
    void *stream, *event, *later;
    float elapsed = 0;
    cudaStreamCreateWithFlags(&stream, 1);
    cudaEventCreateWithFlags(&event, 0), cudaEventCreateWithFlags(&later, 0);
    CHECK(cudaEventElapsedTime(&elapsed, event, later) == INVALID_HANDLE); /* never recorded */
    cudaEventRecord(event, stream);
    CHECK(cudaEventQuery(event) == SUCCESS);
    ghost_hold_events(1);
    cudaEventRecord(later, stream);
    CHECK(cudaEventQuery(event) == SUCCESS && cudaEventQuery(later) == NOT_READY);
    ghost_hold_events(0);
    CHECK(cudaEventQuery(later) == SUCCESS);
    CHECK(cudaEventElapsedTime(&elapsed, event, later) == SUCCESS && elapsed > 0);
    ghost_hold_events(1);
    cudaEventRecord(later, stream);
    cudaDeviceSynchronize();
    CHECK(cudaEventQuery(later) == SUCCESS);
    cudaEventRecord(later, stream);
    cudaEventSynchronize(later); /* never waits */
    CHECK(cudaEventQuery(later) == SUCCESS);
    cudaEventDestroy(event), cudaEventDestroy(later), cudaStreamDestroy(stream);
}

static int destroyed;
static void destroy(void *data) { destroyed += *(int *)data; }

static void capturing(void)
{
    configure(GIB);
    void *origin, *joined, *event, *graph, *executable, *object;
    unsigned long long id = 0, joined_id = 0;
    size_t nodes = 0;
    int active, one = 1;
    char *memory = allocated(4096);
    cudaMemset(memory, 3, 8);
    cudaStreamCreateWithFlags(&origin, 1), cudaStreamCreateWithFlags(&joined, 1);
    cudaEventCreateWithFlags(&event, 0);
    CHECK(cudaStreamBeginCapture(NULL, 0) == NOT_SUPPORTED);
    CHECK(cudaStreamEndCapture(origin, &graph) == CAPTURE_UNMATCHED);

    CHECK(cudaStreamBeginCapture(origin, 0) == SUCCESS);
    cudaStreamIsCapturing(joined, &active);
    CHECK(!active);
    cudaEventRecord(event, origin);
    cudaStreamWaitEvent(joined, event, 0);
    cudaStreamGetCaptureInfo_v3(origin, &active, &id, NULL, NULL, NULL, NULL);
    cudaStreamGetCaptureInfo_v3(joined, &active, &joined_id, NULL, NULL, NULL, NULL);
    CHECK(active && id != 0 && joined_id == id);
    cudaLaunchKernel("k", (dim3){1, 1, 1}, (dim3){1, 1, 1}, NULL, 0, joined);
    cudaMemset(memory, 4, 8); /* captured: it has not happened */
    cudaMemcpy(memory + 8, host, 8, 1);
    cudaMemcpy(memory + 16, memory, 8, 3);
    CHECK(cudaStreamEndCapture(joined, &graph) == CAPTURE_UNMATCHED);
    CHECK(cudaStreamEndCapture(origin, &graph) == SUCCESS);
    cudaStreamIsCapturing(joined, &active);
    CHECK(!active);
    CHECK(!read_back(memory, 8) && !read_back(memory + 8, 8) && !read_back(memory + 16, 8));
    CHECK(cudaGraphGetNodes(graph, NULL, &nodes) == SUCCESS && nodes == 1);

    cudaUserObjectCreate(&object, &one, destroy, 1, 1);
    cudaGraphRetainUserObject(graph, object, 1, 1);
    cudaGraphInstantiateWithFlags(&executable, graph, 0);
    cudaMemset(memory, 3, 8);
    CHECK(read_back(memory, 8));
    cudaGraphLaunch(executable, origin);
    CHECK(!read_back(memory, 8));
    cudaGraphDestroy(graph);
    CHECK(destroyed == 0); /* the executable holds it */
    cudaGraphExecDestroy(executable);
    CHECK(destroyed == 1);
    cudaEventDestroy(event), cudaStreamDestroy(origin), cudaStreamDestroy(joined), cudaFree(memory);
}

/* ---- Libraries ------------------------------------------------------------------------------- */

static void collectives(void)
{
    enum { INT8 = 0, SUM = 0 };
    configure(GIB);
    void *alone, *second_of_four;
    struct nccl_id id;
    char *send = allocated(4096), *receive = allocated(4096);
    ncclGetUniqueId(&id);
    CHECK(ncclCommInitRank(&alone, 1, id, 0) == SUCCESS &&
          ncclCommInitRank(&second_of_four, 4, id, 1) == SUCCESS);
    cudaMemset(send, 6, 64), cudaMemset(receive, 1, 64);
    ncclAllReduce(send, receive, 64, INT8, SUM, alone, NULL);
    CHECK(read_back(receive, 64) && host[0] == 6);
    ncclAllReduce(send, receive, 64, INT8, SUM, second_of_four, NULL);
    CHECK(!read_back(receive, 64) && read_back(send, 64)); /* only what it writes is forgotten */
    ncclBroadcast(send, receive, 64, INT8, 1, second_of_four, NULL);
    CHECK(read_back(receive, 64) && host[0] == 6);
    ncclBroadcast(send, receive, 64, INT8, 0, second_of_four, NULL);
    CHECK(!read_back(receive, 64));
    ncclCommDestroy(alone), ncclCommDestroy(second_of_four), cudaFree(send), cudaFree(receive);
}

static void descriptors(void)
{
    void *tensor;
    int sizes[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, got[12] = {0}, steps[12] = {0}, type, dimensions;
    cudnnCreateTensorDescriptor(&tensor);
    cudnnSetTensorNdDescriptor(tensor, 2, 4, sizes, sizes);
    cudnnGetTensorNdDescriptor(tensor, 2, &type, &dimensions, got, steps);
    CHECK(type == 2 && dimensions == 4 && got[1] == 2 && got[2] == 0);
    cudnnSetTensorNdDescriptor(tensor, 2, 12, sizes, sizes); /* more than there is room for */
    cudnnGetTensorNdDescriptor(tensor, 12, &type, &dimensions, got, steps);
    CHECK(dimensions == 8 && got[7] == 8 && got[8] == 0);
    cudnnDestroyTensorDescriptor(tensor);
}

static void gaps(void)
{
    char text[64], small[8] = "xxxxxxx";
    CHECK(ghost_gaps_reached(NULL, 0) == 1);
    CHECK(ghost_gap_called("first", 801) == 801);
    ghost_gap_called("second", 7), ghost_gap_called("first", 801);
    CHECK(ghost_gaps_reached(text, sizeof text) == 14 && strcmp(text, "first\nsecond\n") == 0);
    CHECK(ghost_gaps_reached(small, sizeof small) == 14 && strcmp(small, "first\n") == 0);
}

static void allocation_log(void)
{
    struct ghost_event events[8];
    configure(GIB);
    void *before = allocated(100), *first, *second, *refused;
    ghost_log_allocations(1);
    ghost_set_label(42);
    first = allocated(1000);
    ghost_set_label(0);
    cudaMallocAsync(&second, 2000, (void *)0x77);
    cudaMalloc(&refused, 2 * GIB);
    cudaFreeAsync(second, (void *)0x77), cudaFree(first), cudaFree(before);
    CHECK(ghost_allocation_log(NULL, 0) == 6);
    CHECK(ghost_allocation_log(events, 2) == 6 && ghost_allocation_log(events, 8) == 6);
    CHECK(events[0].action == GHOST_MALLOC && events[0].size == 1024 && events[0].label == 42);
    CHECK(events[1].action == GHOST_MALLOC_ASYNC && events[1].stream == 0x77 && events[1].label == 0);
    CHECK(events[2].action == GHOST_OUT_OF_MEMORY && events[2].size == 2 * GIB && events[2].address == 0);
    CHECK(events[3].action == GHOST_FREE_ASYNC && events[3].size == 2048 &&
          events[3].address == events[1].address);
    CHECK(events[4].action == GHOST_FREE && events[4].address == (uint64_t)first);
    CHECK(events[5].size == 512 && events[5].time_us >= events[0].time_us);
    ghost_log_allocations(0);
}

/* ---- Threads and forks ----------------------------------------------------------------------- */

static volatile bool stop;

static void *churn(void *ignored)
{
    unsigned char bytes[64] = {1};
    for (int i = 0; i < 20000 && !stop; i++) {
        char *memory = allocated(1000);
        cudaMemcpy(memory, bytes, sizeof bytes, 1);
        cudaMemcpy(bytes, memory, sizeof bytes, 2);
        if (i % 10 == 0)
            launch();
        void *pinned;
        cudaHostAlloc(&pinned, 10, 0);
        cudaFreeHost(pinned);
        cudaFree(memory);
    }
    return NULL;
}

static void threads(void)
{
    pthread_t workers[4];
    configure(GIB);
    for (int i = 0; i < 4; i++)
        pthread_create(&workers[i], NULL, churn, NULL);
    for (int i = 0; i < 4; i++)
        pthread_join(workers[i], NULL);
    CHECK(ghost_counter("used") == 0 && ghost_counter("mallocs") == 80000);
}

/* A child forked while other threads hold the ghost's lock most of the time must not hang. */
static void forks(void)
{
    pthread_t workers[2];
    configure(GIB);
    for (int i = 0; i < 2; i++)
        pthread_create(&workers[i], NULL, churn, NULL);
    for (int i = 0; i < 50; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(10);
            cudaFree(allocated(1000));
            _exit(0);
        }
        int how;
        waitpid(child, &how, 0);
        CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    }
    stop = true;
    for (int i = 0; i < 2; i++)
        pthread_join(workers[i], NULL);
}

#define NAMED(name) {#name, name}

static const struct {
    const char *name;
    void (*run)(void);
} CHECKS[] = {
    NAMED(capacity),
    NAMED(rounding),
    NAMED(many),
    NAMED(configuring),
    NAMED(pools),
    NAMED(virtual_memory),
    NAMED(stray_dereference),
    NAMED(remembered),
    NAMED(launches_forget),
    NAMED(address_reuse),
    NAMED(against_a_referee),
    NAMED(bounded),
    NAMED(strided),
    NAMED(counts),
    NAMED(pointers),
    NAMED(held_events),
    NAMED(capturing),
    NAMED(collectives),
    NAMED(descriptors),
    NAMED(gaps),
    NAMED(allocation_log),
    NAMED(threads),
    NAMED(forks),
};

int main(int count, char **arguments)
{
    for (size_t i = 0; i < sizeof CHECKS / sizeof *CHECKS; i++) {
        if (count == 1)
            puts(CHECKS[i].name);
        else if (strcmp(arguments[1], CHECKS[i].name) == 0)
            return CHECKS[i].run(), 0;
    }
    return count > 1;
}
