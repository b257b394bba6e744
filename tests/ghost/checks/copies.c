/* Known bytes of device memory, and the attributes of pointers. */
#include "checks.h"

#include <sys/mman.h>

/* ---- Remembered bytes ------------------------------------------------------------------------ */

void remembered_copies(void)
{
    configure(GIB);
    char *memory = allocated(8 * MIB);
    const char text[] = "0123456789abcdef";
    CHECK(!read_back(memory, 16) && host[0] == 0 && host[15] == 0 && host[16] == 0xee);

    cudaMemcpy(memory + 100, text, 16, 1);
    CHECK(read_back(memory + 100, 16) && memcmp(host, text, 16) == 0);
    CHECK(read_back(memory + 104, 4) && memcmp(host, "4567", 4) == 0);
    CHECK(!read_back(memory + 99, 16) && host[1] == 0); /* one byte off: all zeros */
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
    cudaMemcpy(memory + 210, memory + 7 * MIB, 4, 3); /* from unknown memory */
    CHECK(!read_back(memory + 208, 4) && read_back(memory + 200, 10) && read_back(memory + 214, 30));

    cudaMemcpy(memory, host, sizeof host, 1); /* too long to be remembered */
    CHECK(!read_back(memory + 100, 16) && !read_back(memory + sizeof host - 1, 1));
    CHECK(read_back(memory + sizeof host, 1));
    cudaFree(memory);
}

void launches_forget(void)
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

void address_reuse(void)
{
    configure(GIB);
    void *memory = allocated(4096);
    cudaMemset(memory, 3, 64);
    cudaFree(memory);
    void *reused = allocated(4096);
    CHECK(reused == memory); /* otherwise this check shows nothing */
    CHECK(!read_back(reused, 64) && host[0] == 0);
    cudaFree(reused);

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

/* Random copies, memsets and reads match a model that keeps one byte and one flag per address. */
void random_copies_match_a_model(void)
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

/* However much is copied, the record stays bounded, and dropped bytes read as unknown. */
void record_is_bounded(void)
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

void strided_copies(void)
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

void answered_counts(void)
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
    ghost_stop_answering_counts();
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

void host_and_device_pointers(void)
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
    CHECK(cudaFreeHost(part) == INVALID_VALUE); /* registered, not allocated */
    CHECK(cudaHostUnregister(part) == SUCCESS && type_of(part) == 0);
    CHECK(cudaHostUnregister(part) == HOST_MEMORY_NOT_REGISTERED);
    CHECK(cudaHostUnregister(pinned) == HOST_MEMORY_NOT_REGISTERED);

    CHECK(cudaFreeHost(pinned) == SUCCESS && cudaFree(managed) == SUCCESS && type_of(managed) == 0);
    CHECK(cudaMallocManaged((void **)&managed, 100, 1) == SUCCESS);
    CHECK(cudaFreeHost(managed) == SUCCESS && cudaFreeHost(NULL) == SUCCESS);
    CHECK(cudaFree(memory) == SUCCESS && type_of(memory) == 0);
    CHECK(ghost_counter("used") == 0);
}

static size_t resident_pages(void *from, size_t size)
{
    static unsigned char present[64 << 10];
    size_t count = 0, pages = size / 4096;
    CHECK(pages <= sizeof present && mincore(from, size, present) == 0);
    for (size_t page = 0; page < pages; page++)
        count += present[page] & 1;
    return count;
}

void pinned_memory_takes_no_pages(void)
{
    const size_t size = 64 << 20, skipped = 100;
    configure(GIB);
    char *pinned, *memory = allocated(size);
    unsigned char *registered = malloc(size);
    CHECK(registered && cudaHostAlloc((void **)&pinned, size, 0) == SUCCESS);
    memset(pinned, 7, size);
    CHECK(resident_pages(pinned, size) == size / 4096);
    CHECK(cudaMemcpy(pinned + skipped, memory, size - 2 * skipped, 2) == SUCCESS);
    CHECK(resident_pages(pinned, size) == 2); /* the first and the last */
    CHECK(pinned[skipped - 1] == 7 && pinned[skipped] == 0 && pinned[size / 2] == 0);
    CHECK(pinned[size - skipped - 1] == 0 && pinned[size - skipped] == 7 && pinned[4096] == 0);

    CHECK(cudaHostRegister(registered, size, 0) == SUCCESS); /* may be shared with another process */
    memset(registered, 7, size);
    CHECK(cudaMemcpy(registered, memory, size, 2) == SUCCESS);
    CHECK(registered[0] == 0 && registered[size - 1] == 0);
    CHECK(cudaHostUnregister(registered) == SUCCESS && cudaFreeHost(pinned) == SUCCESS);
    free(registered);
    cudaFree(memory);
}
