/* Kernels: the architecture that each was compiled for. */
#include "checks.h"

void **__cudaRegisterFatBinary(void *);
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *,
                            int *);
status cudaFuncGetAttributes(void *, const void *);

#define BINARY_VERSION 9 /* index of binaryVersion among the ints of cudaFuncAttributes */

static int version_of(const char *kernel)
{
    int attributes[36];
    CHECK(cudaFuncGetAttributes(attributes, kernel) == SUCCESS);
    return attributes[BINARY_VERSION];
}

static void on_device(int major, int minor)
{
    ghost_spec.major = major;
    ghost_spec.minor = minor;
}

struct image {
    uint16_t kind, version;
    uint32_t header_size;
    uint64_t size;
    uint32_t unused[3], architecture;
    uint64_t payload;
};
struct binary {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size;
    struct image images[4];
};
struct wrapper {
    uint32_t magic, version;
    void *binary, *unused;
};

static struct image image(int kind, int architecture)
{
    return (struct image){(uint16_t)kind, 1, 32, 8, {0}, (uint32_t)architecture, 0};
}

void kernel_architectures(void)
{
    struct binary binary = {
        0xBA55ED50u, 1, 16, sizeof binary.images, {image(2, 75), image(2, 80), image(2, 86), image(1, 90)}};
    struct wrapper wrapper = {0x466243B1u, 1, &binary, NULL};
    const char *kernel = "kernel", *other = "other", *cut = "cut";
    __cudaRegisterFunction(__cudaRegisterFatBinary(&wrapper), kernel, NULL, NULL, 0, NULL, NULL, NULL, NULL,
                           NULL);
    const int expected[][3] = {{7, 5, 75}, {8, 0, 80}, {8, 6, 86}, {8, 9, 86}, {9, 0, 90}, {12, 0, 90}};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        on_device(expected[i][0], expected[i][1]);
        CHECK(version_of(kernel) == expected[i][2]);
    }
    on_device(8, 9);
    CHECK(version_of("never registered") == 89);
    wrapper.magic = 1;
    __cudaRegisterFunction(__cudaRegisterFatBinary(&wrapper), other, NULL, NULL, 0, NULL, NULL, NULL, NULL,
                           NULL);
    CHECK(version_of(other) == 89);
    wrapper.magic = 0x466243B1u;
    binary.images[1].size = 1 << 20; /* beyond the end: it and what follows is ignored */
    __cudaRegisterFunction(__cudaRegisterFatBinary(&wrapper), cut, NULL, NULL, 0, NULL, NULL, NULL, NULL,
                           NULL);
    CHECK(version_of(cut) == 89 && version_of(kernel) == 86);
    on_device(7, 5);
    CHECK(version_of(cut) == 75);
}
