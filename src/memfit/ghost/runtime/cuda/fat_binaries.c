/* Fat binaries: the architectures that a kernel was compiled for, and the one that the device runs.
 *
 *   compiled for 7.5, 8.0, 8.6, 9.0     A100 (8.0): 8.0     RTX 4090 (8.9): 8.6     H100 (9.0): 9.0
 *
 * A device runs the latest binary of its own major version that is not newer than itself or, without one, the
 * latest PTX that is not newer. CUB chooses its algorithms by that version, and fails for a version that it
 * was not compiled for.
 *
 * NVIDIA does not document the layout. It is that of PyTorch 2.14.1's libtorch_cuda.so (nvcc 13.0); magic
 * numbers and sizes are checked, and a kernel in another layout counts as compiled for the device.
 *
 * nvcc adds calls to the __cuda functions below, and to those that launch (kernels.c), to every object file.
 * They are in no header; their prototypes are from crt/host_runtime.h in the CUDA toolkit (12 and 13).
 */
#include "core/ghost.h"

#include "hash_table.h"

#define WRAPPER_MAGIC 0x466243B1u
#define BINARY_MAGIC 0xBA55ED50u
#define MOST_IMAGES 32

struct wrapper {
    uint32_t magic, version;
    const unsigned char *binary;
};
struct binary_header {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size; /* of all images, after the header */
};
struct image_header {
    uint16_t kind, version;
    uint32_t header_size;
    uint64_t size; /* after this header */
    uint32_t unused[3];
    uint32_t architecture; /* 86: compute capability 8.6 */
};
enum { PTX = 1, BINARY = 2 };
_Static_assert(sizeof(struct image_header) == 32, "the fixed part of an image's header");

struct fat_binary {
    int count;
    struct {
        uint16_t kind;
        int architecture;
    } images[MOST_IMAGES];
};

/* Host function of a kernel -> its fat binary. Both stay when a library is unloaded. */
static struct hash_table kernels;

static void read_images(struct fat_binary *found, const struct wrapper *wrapper)
{
    struct binary_header header;
    if (!wrapper || wrapper->magic != WRAPPER_MAGIC || !wrapper->binary)
        return;
    memcpy(&header, wrapper->binary, sizeof header);
    if (header.magic != BINARY_MAGIC || header.header_size < sizeof header)
        return;
    const unsigned char *at = wrapper->binary + header.header_size;
    uint64_t left = header.size;
    while (left >= sizeof(struct image_header) && found->count < MOST_IMAGES) {
        struct image_header image;
        memcpy(&image, at, sizeof image);
        if (image.header_size < sizeof image || image.header_size > left ||
            image.size > left - image.header_size)
            return;
        found->images[found->count].kind = image.kind;
        found->images[found->count++].architecture = (int)image.architecture;
        at += image.header_size + image.size;
        left -= image.header_size + image.size;
    }
}

API void **__cudaRegisterFatBinary(void *wrapper)
{
    static struct fat_binary none;
    struct fat_binary *found = calloc(1, sizeof *found);
    if (found)
        read_images(found, wrapper);
    return (void **)(found ? found : &none);
}

API void __cudaRegisterFatBinaryEnd(void **handle) {}
API void __cudaUnregisterFatBinary(void **handle) {}
API char __cudaInitModule(void **handle) { return 1; }

API void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name,
                                int thread_limit, void *thread_id, void *block_id, void *block_dim,
                                void *grid_dim, int *warp_size)
{
    ghost_lock();
    hash_table_put(&kernels, (uint64_t)function, handle);
    ghost_unlock();
}

API void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int external,
                           size_t size, int constant, int global)
{
}

int kernel_architecture(const void *function)
{
    int device = 10 * ghost_spec.major + ghost_spec.minor, binary = 0, ptx = 0;
    ghost_lock();
    const struct fat_binary *found = hash_table_get(&kernels, (uint64_t)function);
    ghost_unlock();
    for (int i = 0; found && i < found->count; i++) {
        int architecture = found->images[i].architecture;
        if (architecture > device)
            continue;
        if (found->images[i].kind == PTX && architecture > ptx)
            ptx = architecture;
        if (found->images[i].kind == BINARY && architecture / 10 == device / 10 && architecture > binary)
            binary = architecture;
    }
    return binary ? binary : ptx ? ptx : device;
}
